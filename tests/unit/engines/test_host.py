"""Listeners of this machine: those for its own processes are not reached at its other addresses."""

import errno
import os
import socket
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from fuligo.engines.host import (
    PortClaims,
    endpoint,
    is_loopback,
    listening_socket,
    listening_store,
    own_address,
    reachable_by_others,
    use_loopback_interface,
)

ANOTHER_ADDRESS = "127.0.0.2"
"""Address of this machine that stands for its address in the network: a server that listens on every interface answers there."""


def listening_addresses() -> set[str]:
    """Return the local addresses (hexadecimal) of this process's listening TCP sockets."""
    folder = Path("/proc/self")
    links = [str(file.readlink()) for file in (folder / "fd").iterdir() if file.is_symlink() and file.exists()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in (folder / "net" / kind).read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_store_listens_only_at_its_host() -> None:
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


HAS_IPV6 = socket.has_dualstack_ipv6()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


def test_own_address_towards_hosts_of_either_family() -> None:
    assert own_address(["http://127.0.0.1:30000", "http://localhost"]) in ("127.0.0.1", "::1")
    with pytest.raises(OSError, match=r"Name or service|Temporary failure|No address|not known"):
        own_address(["http://known-to-nobody.invalid:1"])


@needs_ipv6
def test_own_address_towards_ipv6_hosts() -> None:
    assert own_address(["http://[::1]:30000"]) == "::1"


def test_a_name_whose_ipv6_address_cannot_be_reached_is_reached_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host without IPv6, where the name server still returns such addresses first."""
    found = [
        (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("2001:db8::7", 80, 0, 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 80)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", partial(_socket_without_ipv6, socket.socket))
    assert own_address(["http://both"]) == "127.0.0.1"


def _socket_without_ipv6(real: type[socket.socket], family: int = socket.AF_INET, *arguments: int) -> socket.socket:
    if family == socket.AF_INET6:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    return real(family, *arguments)


def test_ports_are_claimed_on_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    monkeypatch.setattr(socket, "socket", partial(_socket_without_ipv6, socket.socket))
    with PortClaims() as claims:
        assert claims.claim() > 0


@needs_ipv6
def test_a_port_that_is_in_use_only_at_an_ipv6_address_is_skipped() -> None:
    with PortClaims() as first:
        port = first.claim()
    with socket.create_server(("::1", port), family=socket.AF_INET6), PortClaims() as second:
        assert second.claim() != port


@needs_ipv6
def test_a_store_listens_at_an_ipv6_address() -> None:
    store = listening_store("::1")
    socket.create_connection(("::1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))


def test_endpoint() -> None:
    assert (endpoint("10.0.0.7", 80), endpoint("::1", 80), endpoint("node7", 80)) == ("10.0.0.7:80", "[::1]:80", "node7:80")


def test_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "localhost.example", "::"))


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_a_process_group_on_one_host_listens_only_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
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
