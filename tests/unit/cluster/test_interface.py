"""The network interface that torch is set to use."""

from types import SimpleNamespace

import pytest

from fuligo.cluster import node
from fuligo.cluster.node import use_interface_of


@pytest.fixture(autouse=True)
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": ["127.0.0.1"], "eth0": ["fe80::1", "10.0.0.7"], "ib0": ["192.168.0.7"]}
    interfaces = {name: [SimpleNamespace(address=address) for address in its] for name, its in addresses.items()}
    monkeypatch.setattr(node.psutil, "net_if_addrs", lambda: interfaces)


def test_the_interface_with_the_nodes_address_is_used() -> None:
    environment: dict[str, str] = {}
    use_interface_of("192.168.0.7", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}


def test_use_interface_of_keeps_the_users_choice() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth"}
    use_interface_of("192.168.0.7", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth"}


def test_a_translated_address_changes_nothing() -> None:
    environment: dict[str, str] = {}
    use_interface_of("203.0.113.5", environment)
    assert environment == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_on_a_single_node_gloo_listens_on_loopback(address: str) -> None:
    environment: dict[str, str] = {}
    use_interface_of(address, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
