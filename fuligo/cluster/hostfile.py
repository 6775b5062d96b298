"""Nodes of a cluster from a file in Open MPI's form: one address on each line, with its number of GPUs (`10.0.0.7 slots=8`)."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fuligo.engines.host import bracketed, own_address
from fuligo.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LINE = re.compile(r"(?P<address>\S+)(?:\s+slots?\s*=\s*(?P<slots>\d+))?(?:\s+max_slots\s*=\s*\d+)?", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]*")
"""Host name, alias of ssh or IP address. It begins with no `-`, so that no command takes it for an option."""


@dataclass(slots=True, frozen=True)
class Host:
    address: str
    """IP address or name, as ssh takes it."""
    num_slots: int
    """Number of GPUs; on a CPU of processes."""

    @property
    def ip(self) -> str | None:
        """The address if it is an IP address; a name may resolve differently on its own host."""
        try:
            return str(ip_address(self.address))
        except ValueError:
            return None


def read_hostfile(path: Path, *, default_slots: int) -> list[Host]:
    """Read the hosts of a hostfile.

    Args:
        default_slots: slots of a line that gives none

    Raises:
        ConfigError: the file cannot be read, lists no host, lists one twice, or has a malformed line
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from error
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ConfigError(f"--hostfile {path}, line {number}: {entry!r} is not `address` or `address slots=8`")
        require_host_name(match["address"], f"--hostfile {path}, line {number}")
        if match["address"] in (host.address for host in hosts):
            raise ConfigError(f"--hostfile {path}, line {number}: {match['address']} is listed twice")
        hosts.append(Host(match["address"], int(match["slots"] or default_slots)))
    if not hosts:
        raise ConfigError(f"--hostfile {path} lists no host")
    return hosts


def require_host_name(name: str, source: str) -> None:
    """Refuse what is neither a host name nor an IP address, before a shell or ssh sees it.

    Args:
        source: where the name stands

    Raises:
        ConfigError: it holds other characters
    """
    if _HOST_NAME.fullmatch(name) is None:
        raise ConfigError(f"{source}: {name!r} is not a host name or an IP address (letters, digits and . : _ -, with no - in front)")


def head_of(hosts: Sequence[Host]) -> Host | None:
    """Return the first host that is this machine; None if none is."""
    return next((host for host in hosts if _is_here(host.address)), None)


def head_ip(head: Host | None, others: Sequence[Host]) -> str:
    """Return the IP address by which the other hosts reach this machine.

    Raises:
        ConfigError: it cannot be determined
    """
    if head is not None and head.ip is not None:
        return head.ip
    for other in others:
        with suppress(OSError):  # a name that only ssh can resolve
            return own_address([f"http://{bracketed(other.address)}"])
    if head is None or others:
        raise ConfigError(
            "--hostfile: cannot determine the address by which the other hosts reach this machine; list its IP address as the first line"
        )
    return LOOPBACK


def _is_here(address: str) -> bool:
    """Return whether the address is one of this machine's: only those can be bound."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:  # a name that only ssh can resolve
        return False
    return any(_can_be_bound(family, its) for family, _, _, _, its in found)


def _can_be_bound(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
