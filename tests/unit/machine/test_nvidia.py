"""nvidia-smi's texts; those of two H200 are as the program printed them, terminal colors included."""

from pathlib import Path

import pytest

from fuligo.machine.nvidia import Gpu, Gpus, parse_devices, parse_matrix, read_gpus

TEXTS = Path(__file__).parent / "nvidia_smi"


def gpus(name: str) -> Gpus:
    devices, links, peers = ((TEXTS / f"{name}_{part}.txt").read_text() for part in ("devices", "links", "peers"))
    return Gpus(parse_devices(devices), parse_matrix(links), parse_matrix(peers))


def test_gpus_with_nvlink_between_them() -> None:
    found = gpus("h200_x2")
    assert found.devices[1] == Gpu(1, "NVIDIA H200", 143771 * 1024**2, "580.159.04", 4 * 1024**2)
    assert found.links == (("X", "NV18"), ("NV18", "X"))
    assert found.without_nvlink(2) == found.without_peer_access(2) == []


def test_gpus_that_only_pcie_connects() -> None:
    found = gpus("pcie_x4")
    assert found.links[2] == ("SYS", "SYS", "X", "PHB"), "the network card is no GPU"
    assert found.without_nvlink(2) == [(0, 1)] and found.without_peer_access(2) == []
    assert found.without_peer_access(4) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_messages_of_a_broken_driver_are_no_devices() -> None:
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver, version mismatch, 1, 2\n"
    assert parse_devices(text) == () and parse_matrix(text) == ()


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    answers = {"topo\\ -m": "links", "topo\\ -p2p*": "peers", "*": "devices"}
    cases = "\n".join(f"{arguments}) cat {TEXTS}/h200_x2_{part}.txt;;" for arguments, part in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\nesac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_gpus() == gpus("h200_x2")


def test_without_the_program_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == Gpus()
