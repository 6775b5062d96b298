import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.machine.facts import Machine, Torch, read_machine
from fuligo.machine.findings import Finding, machine_findings
from fuligo.machine.needs import needs
from fuligo.machine.nvidia import Gpus
from fuligo.machine.packages import package_versions
from tests.unit.machine.test_nvidia import gpus

LAPTOP = Machine("3.11.9", "Linux x86_64", Torch("2.13.0+cpu", num_threads=8), None, num_open_files=20_000, shared_memory_bytes=8 * 1024**3)
TWO_H200 = replace(LAPTOP, torch=Torch("2.11.0+cu130", "13.0", "2.28.9", 2), gpus=gpus("h200_x2"))
FOUR_L4 = replace(TWO_H200, torch=Torch("2.11.0+cu130", "13.0", "2.28.9", 4), gpus=gpus("pcie_x4"))
PINNED = {"sglang": "0.5.15.post1", "sglang-router": "0.3.2", "megatron-core": "0.16.1", "transformer-engine": "2.9.0", "ray": "2.50.0"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def config(checkpoint: Path, *flags: str) -> Config:
    return parse(["--hf-checkpoint", str(checkpoint), *flags]).config


def installed(packages: Mapping[str, str]):
    def versions(names: Sequence[str], python: str, environment: Mapping[str, str]) -> dict[str, str | None]:
        return {name: packages.get(name) for name in names}

    return versions


def found(config: Config, machine: Machine, packages: Mapping[str, str] = PINNED) -> dict[str, Finding]:
    return {finding.name: finding for finding in needs(config, machine, installed(packages))}


def test_a_small_run_needs_little(checkpoint: Path) -> None:
    report = found(config(checkpoint), LAPTOP, {})
    assert set(report) == {"device", "shared memory", "open files"}
    assert not any(finding.problem or finding.warning for finding in report.values())
    assert "--device auto finds no GPU" in report["device"].value


def test_packages_of_the_backends_in_their_versions(checkpoint: Path) -> None:
    asked = config(checkpoint, "--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
    packages = {name: found(asked, TWO_H200)[name] for name in ("megatron-core", "transformer-engine", "sglang", "sglang-router")}
    assert not any(finding.problem for finding in packages.values())
    wrong = found(asked, TWO_H200, {"sglang": "0.5.0", "megatron-core": "0.16.1"})
    assert "-m pip install sglang==0.5.15.post1" in (wrong["sglang"].problem or "")
    assert "-m pip install sglang-router==0.3.2" in (wrong["sglang-router"].problem or "")
    assert "pip install transformer-engine" in (wrong["transformer-engine"].problem or "")
    assert "ray" not in wrong, "one node needs none"
    only_sampling = config(checkpoint, "--train-backend", "megatron", "--rollout-num-gpus", "1", "--debug-rollout-only")
    assert not {"megatron-core", "transformer-engine"} & found(only_sampling, TWO_H200).keys(), "the trainer's packages"


def test_several_nodes_need_ray(checkpoint: Path) -> None:
    asked = config(checkpoint, "--train-backend", "megatron", "--actor-num-nodes", "2", "--rollout-num-gpus", "8")
    assert found(asked, TWO_H200)["ray"].problem is None
    assert "pip install ray" in (found(asked, TWO_H200, {})["ray"].problem or "")


def test_images_need_pillow(checkpoint: Path) -> None:
    asked = config(checkpoint, "--multimodal-keys", '{"image": "images"}', "--apply-chat-template")
    assert found(asked, LAPTOP, {"pillow": "13.0.0"})["pillow"].problem is None
    assert "pip install pillow" in (found(asked, LAPTOP, {})["pillow"].problem or "")


def test_the_megatron_trainer_needs_gpus(checkpoint: Path) -> None:
    asked = config(checkpoint, "--train-backend", "megatron", "--rollout-num-gpus", "8")
    assert "needs GPUs" in (found(asked, LAPTOP)["device"].problem or "")


def test_gpus_are_counted(checkpoint: Path) -> None:
    asked = config(checkpoint, "--device", "cuda", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2")
    assert found(asked, FOUR_L4)["GPUs"].problem is None and found(asked, FOUR_L4)["NCCL"].value == "2.28.9"
    short = found(asked, TWO_H200)["GPUs"]
    assert short.value == "4 needed, 2 here" and "--rollout-num-gpus" in (short.problem or "")
    none = found(asked, LAPTOP)["GPUs"]
    assert none.value == "4 needed, 0 here" and none.problem
    cpu_build = found(asked, replace(FOUR_L4, torch=LAPTOP.torch))["GPUs"]
    assert "CPU build" in (cpu_build.problem or "")


def test_tensor_parallelism_wants_nvlink(checkpoint: Path) -> None:
    def link(machine: Machine, size: int) -> Finding:
        flags = (
            "--rollout-num-gpus",
            str(size),
            "--rollout-num-gpus-per-engine",
            str(size),
            "--actor-num-gpus-per-node",
            "1",
            "--colocate",
        )
        return found(config(checkpoint, *flags), machine)["peer access"]

    assert link(TWO_H200, 2).warning is None
    assert "no NVLink" in (link(FOUR_L4, 2).warning or "")
    assert "cannot access each other's memory" in (link(FOUR_L4, 4).warning or "")


def test_weights_must_fit_into_shared_memory(checkpoint: Path) -> None:
    tight = replace(LAPTOP, shared_memory_bytes=999)
    assert "--shm-size" in (found(config(checkpoint), tight)["shared memory"].problem or "")
    assert found(config(checkpoint, "--update-weight-buffer-size", "400"), tight)["shared memory"].problem is None
    assert "tmpfs" in (found(config(checkpoint), replace(LAPTOP, shared_memory_bytes=None))["shared memory"].problem or "")


def test_a_connection_for_each_request_in_flight(checkpoint: Path) -> None:
    asked = config(checkpoint, "--rollout-concurrency", "1000")
    few = found(asked, replace(LAPTOP, num_open_files=1024))["open files"]
    assert "ulimit -Hn 1256" in (few.problem or "")
    assert found(asked, replace(LAPTOP, num_open_files=1256))["open files"].problem is None


def test_ports_that_others_hold_are_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(checkpoint, "--rollout-num-gpus", "2", "--device", "cpu")
    with socket.socket() as held:
        held.bind(("", 0))
        port = held.getsockname()[1]
        monkeypatch.setattr("fuligo.engines.host.LAST_PORT", port + 2)
        monkeypatch.setattr("fuligo.engines.host.FIRST_PORT", port)
        assert "cannot find a free port" in (found(asked, LAPTOP)["ports"].problem or "")
    monkeypatch.undo()
    assert found(asked, LAPTOP)["ports"].problem is None


def test_this_machine() -> None:
    machine = read_machine()
    report = {finding.name: finding for finding in machine_findings(machine)}
    assert report["Python"].problem is None and report["torch"].problem is None
    assert machine.memory_bytes > 0 and machine.num_cores >= 1 and machine.num_open_files > 0
    assert machine.torch is not None and machine.torch.num_devices <= max(len(machine.gpus.devices), machine.torch.num_devices)


def test_sglang_is_reported_where_runs_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make install-gpu` gives it an environment next to fuligo's."""
    python = tmp_path / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("""#!/bin/sh\necho '{"sglang": "0.5.15", "sglang-router": null}'\n""")
    python.chmod(0o755)
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    report = {finding.name: finding.value for finding in machine_findings(LAPTOP)}
    assert report["sglang"] == f"0.5.15 in {tmp_path / '.venv-sglang'}"
    assert report["sglang-router"] == "not installed (optional)"


def test_gpus_that_torch_does_not_see_are_reported() -> None:
    report = {finding.name: finding for finding in machine_findings(replace(TWO_H200, torch=LAPTOP.torch))}
    assert "CPU build" in (report["CUDA devices"].warning or "") and report["NVLink"].value == "between all 2 GPUs"
    broken = replace(LAPTOP, torch=None, torch_problem="ImportError: libcudart.so.13", gpus=Gpus())
    assert "libcudart" in (machine_findings(broken)[1].problem or "")


def test_versions_of_another_interpreter() -> None:
    import sys

    versions = package_versions(["pydantic", "no-such-package"])
    link = Path(sys.executable).parent / "python3"
    assert package_versions(["pydantic", "no-such-package"], str(link)) == versions
    assert versions["no-such-package"] is None and versions["pydantic"]
    assert package_versions(["pydantic"], "/no/such/python") == {"pydantic": None}


def test_versions_of_what_an_environment_adds(tmp_path: Path) -> None:
    installed = tmp_path / "nowhere_else-1.2.3.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: nowhere-else\nVersion: 1.2.3\n")
    assert package_versions(["nowhere-else"], environment={"PYTHONPATH": str(tmp_path)}) == {"nowhere-else": "1.2.3"}
    assert package_versions(["nowhere-else"]) == {"nowhere-else": None}
