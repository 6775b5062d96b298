"""The nodes of a cluster, from a file: an address a line, with its GPUs as Open MPI writes them (`10.0.0.7 slots=8`)."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from fuligo.engines.host import own_address
from fuligo.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LINE = re.compile(r"(?P<address>[\w.:-]+)(?:\s+slots?\s*=\s*(?P<slots>\d+))?(?:\s+max_slots\s*=\s*\d+)?")


@dataclass(slots=True, frozen=True)
class Host:
    address: str
    """As ssh takes it: an IP address, or a name."""
    num_slots: int
    """GPUs; on a CPU processes."""

    @property
    def ip(self) -> str | None:
        """Where the address is one. A name may lead elsewhere on its own host than on others."""
        try:
            return str(ip_address(self.address))
        except ValueError:
            return None


def read_hostfile(path: Path, *, default_slots: int) -> list[Host]:
    """Args:
        default_slots: of a line that gives none

    Raises:
        ConfigError: the file cannot be read, has no hosts, one twice, or a line that is none
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
            raise ConfigError(f"--hostfile {path}, line {number}: {entry!r} is no `address` or `address slots=8`")
        if match["address"] in (host.address for host in hosts):
            raise ConfigError(f"--hostfile {path}, line {number}: {match['address']} stands there twice")
        hosts.append(Host(match["address"], int(match["slots"] or default_slots)))
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host")
    return hosts


def head_of(hosts: Sequence[Host]) -> Host | None:
    """The first that is this machine; None where none is."""
    return next((host for host in hosts if _is_here(host.address)), None)


def head_ip(head: Host | None, others: Sequence[Host]) -> str:
    """By which the others reach this machine.

    Raises:
        ConfigError: that cannot be told
    """
    if head is not None and head.ip is not None:
        return head.ip
    for other in others:
        with suppress(OSError):  # a name that only ssh knows
            return own_address([f"http://{other.address}"])
    if head is None or others:
        raise ConfigError(
            "--hostfile: this machine does not know how the other hosts reach it; give its IP address there, as the first line"
        )
    return LOOPBACK


def _is_here(address: str) -> bool:
    """Only an own address can be bound."""
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
