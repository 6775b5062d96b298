"""Listeners of this machine: those for its own processes are not reached at its other addresses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from fuligo.engines.host import is_loopback, listening_socket, listening_store, reachable_by_others, use_loopback_interface

ANOTHER_ADDRESS = "127.0.0.2"
"""Address of this machine that stands for its address in the network: a server that listens on every interface answers there."""


def listening_addresses() -> set[str]:
    """Return the local addresses (hexadecimal) of this process's listening TCP sockets."""
    folder = Path("/proc/self")
    links = [str(file.readlink()) for file in (folder / "fd").iterdir() if file.is_symlink() and file.exists()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in (folder / "net" / kind).read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_store_listens_at_its_host_alone() -> None:
    store = listening_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ANOTHER_ADDRESS, store.port))


def test_a_store_behind_a_translated_address_listens_everywhere_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with listening_socket("192.0.2.1") as listener:
        socket.create_connection((ANOTHER_ADDRESS, listener.getsockname()[1])).close()
    assert "192.0.2.1 is not an address of this machine's interfaces" in caplog.text


def test_use_loopback_interface_keeps_the_users_choice() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}
    use_loopback_interface(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(("host", "inside"), [("127.0.0.1", "lo"), ("10.0.0.7", None)])
def test_a_group_with_engines_elsewhere_leaves_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch, host: str, inside: str | None
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with reachable_by_others(host):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == inside
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "localhost.example", "::"))


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_a_process_group_on_one_host_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("TP_SOCKET_IFNAME", raising=False)
    before = listening_addresses()
    use_loopback_interface(os.environ)
    store = listening_store("127.0.0.1")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert listening_addresses() - before <= {"0100007F"}
        assert "0100007F" in listening_addresses()
    finally:
        dist.destroy_process_group()
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.pop(name, None)
