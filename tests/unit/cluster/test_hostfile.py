"""Files that list the nodes of a cluster."""

from pathlib import Path

import pytest

from fuligo.cluster import hostfile
from fuligo.cluster.hostfile import Host, head_ip, head_of, read_hostfile, require_listed_once
from fuligo.errors import ConfigError


def test_read_hostfile_accepts_common_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# cluster\n10.0.0.1 slots=4\n\n10.0.0.2 slot=2  # half\nnode-3.local\n10.0.0.4 slots = 8 max_slots=8\n")
    assert read_hostfile(path, default_slots=8) == [Host("10.0.0.1", 4), Host("10.0.0.2", 2), Host("node-3.local", 8), Host("10.0.0.4", 8)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.1 slots=eight", "line 1: '10.0.0.1 slots=eight' is no"),
        ("10.0.0.1\n10.0.0.1 slots=2", "line 2: 10.0.0.1 is listed twice"),
        ("# no host\n", "lists no host"),
        ("# first\n\n-oProxyCommand=reboot slots=8", "line 3: '-oProxyCommand=reboot' is not a host name"),
        ("$(reboot)", "line 1: '\\$\\(reboot\\)' is not a host name"),
        ("root;reboot", "line 1: 'root;reboot' is not a host name"),
    ],
)
def test_read_hostfile_names_the_line_of_an_error(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_hostfile(tmp_path / "hosts", default_slots=8)


def test_a_missing_hostfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "hosts", default_slots=8)


def test_the_head_is_the_host_that_is_this_machine() -> None:
    here, elsewhere = Host("127.0.0.1", 8), Host("192.0.2.200", 8)
    assert head_of([elsewhere, here]) == here
    assert head_of([elsewhere]) is None


def test_this_machine_under_two_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfile, "own_address", lambda urls: "10.0.0.1")
    head = Host("localhost", 8)
    with pytest.raises(ConfigError, match=r"localhost and 10\.0\.0\.1 are both this machine"):
        require_listed_once(head, [head, Host("10.0.0.2", 8), Host("10.0.0.1", 8)])
    require_listed_once(head, [head, Host("10.0.0.2", 8)])
    require_listed_once(None, [Host("10.0.0.1", 8)])


def test_the_others_reach_the_head_by_its_ip_address() -> None:
    """The head's name may resolve to its loopback interface on the head itself."""
    by_number, by_name, elsewhere = Host("127.0.0.2", 8), Host("localhost", 8), Host("127.0.0.3", 8)
    assert head_ip(by_number, [elsewhere]) == "127.0.0.2"
    assert head_ip(by_name, [elsewhere]) == "127.0.0.1"
    assert head_ip(by_name, []) == "127.0.0.1"
    assert head_ip(None, [elsewhere]) == "127.0.0.1"


def test_a_head_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot determine the address by which the other hosts reach this machine"):
        head_ip(Host("localhost", 8), [Host("known-to-ssh.invalid", 8)])
