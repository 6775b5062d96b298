"""Hosts of a cluster, from a hostfile in Open MPI's format (`10.0.0.7 slots=8` per line), or from the variables of a Slurm job."""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import product
from pathlib import Path

from fuligo.engines.host import LOOPBACK, bracketed, own_address
from fuligo.errors import ConfigError

_LINE = re.compile(r"(?P<address>\S+)(?:\s+slots?\s*=\s*(?P<slots>\d+))?(?:\s+max_slots\s*=\s*\d+)?", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]*")
"""Host name, ssh alias or IP address, without a leading `-`, so that no command takes it for an option."""


@dataclass(slots=True, frozen=True)
class Host:
    """Host of a cluster, with its slots."""

    address: str
    """IP address or name, as ssh accepts it."""
    num_slots: int
    """Number of GPUs, or of processes on a CPU."""

    @property
    def ip(self) -> str | None:
        """The address if it is an IP address, else None, because a name may resolve differently on the host itself."""
        try:
            return str(ip_address(self.address))
        except ValueError:
            return None


def read_hostfile(path: Path, *, default_slots: int) -> list[Host]:
    """Read the hosts of a hostfile. `default_slots`: slots of a line without a number.

    Raises ConfigError if the file cannot be read, lists no host, lists one twice, or has a malformed line.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read --hostfile {path}: {error.strerror}") from error
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
            raise ConfigError(f"--hostfile {path}, line {number}: {match['address']} is listed twice; remove one of the lines")
        hosts.append(Host(match["address"], int(match["slots"] or default_slots)))
    if not hosts:
        raise ConfigError(f"--hostfile {path} lists no host; write one per line, such as `10.0.0.7 slots=8`")
    return hosts


def require_host_name(name: str, source: str) -> None:
    """Raise ConfigError if `name`, found in `source`, is not a host name or an IP address; checked before a shell or ssh gets it."""
    if _HOST_NAME.fullmatch(name) is None:
        raise ConfigError(f"{source}: {name!r} is not a host name or an IP address (letters, digits and . : _ -, without a leading -)")


def head_of(hosts: Sequence[Host]) -> Host | None:
    """Return the first host that is this machine; None if none is."""
    return next((host for host in hosts if _is_here(host.address)), None)


def require_listed_once(head: Host | None, hosts: Sequence[Host]) -> None:
    """Check that no other line names this machine, whose GPUs would count twice. Raises ConfigError if one does."""
    for host in hosts:
        if head is not None and host != head and _is_own_address(host.address):
            raise ConfigError(
                f"--hostfile: {head.address} and {host.address} are both this machine ({socket.gethostname()}); remove one of the lines"
            )


def head_ip(head: Host | None, others: Sequence[Host]) -> str:
    """Return the IP address by which the other hosts reach this machine. Raises ConfigError if it cannot be determined."""
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
    """Return whether the address belongs to this machine: only own addresses can be bound."""
    with suppress(OSError):  # a name that only ssh can resolve
        for family, _, _, _, its in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as probe:
                probe.bind(its)
                return True
    return False


def _is_own_address(address: str) -> bool:
    """Return whether packets to the address stay on this machine; False for loopback addresses, which name several hosts in tests."""
    with suppress(OSError):
        ip = own_address([f"http://{bracketed(address)}"])
        return not ip_address(ip).is_loopback and ip in {its[0] for *_, its in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)}
    return False


NODES_VARIABLE = "SLURM_JOB_NODELIST"
SRUN = "srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --mem=0 --nodelist={host} sh -c {command}"
"""Command template. The step shares the job's CPUs, memory and GPUs with the other steps."""
_ENTRY = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\]]+)")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)


def slurm_hosts(environment: Mapping[str, str], *, default_slots: int) -> list[Host]:
    """Return the nodes of the Slurm job, all with the number of GPUs that the job has on this node.

    `default_slots`: slots of a node if the job requested no GPUs (whole nodes, or CPUs). Raises ConfigError if Slurm's variables are
    malformed.
    """
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    count = given.rpartition(":")[2]  # some versions write the type first: `a100:4`
    if given and not count.isdecimal():
        raise ConfigError(f"cannot read SLURM_GPUS_ON_NODE={given}: it is not a number of GPUs; list the hosts with --hostfile")
    num_slots = int(count) if given else default_slots
    return [Host(name, num_slots) for name in expand_node_list(environment[NODES_VARIABLE])]


def task_number(environment: Mapping[str, str]) -> int:
    """Return the number of this task in its Slurm step; 0 in a batch script and outside of Slurm. Raises ConfigError if malformed."""
    given = environment.get("SLURM_PROCID") or "0"
    if not given.isdecimal():
        raise ConfigError(f"cannot read SLURM_PROCID={given}: it is not a number; unset it outside of Slurm")
    return int(given)


def expand_node_list(text: str) -> list[str]:
    """Expand Slurm's list: `gpu[08-10,12],login` becomes gpu08, gpu09, gpu10, gpu12, login. Raises ConfigError if it is malformed."""
    entries = _ENTRY.findall(text)
    try:
        if ",".join(entries) != text or not entries:
            raise ValueError
        names = [name for entry in entries for name in _expand_entry(entry)]
    except ValueError:
        raise ConfigError(
            f"cannot read {NODES_VARIABLE}={text}: expected a list such as node[01-04,7],login; list the hosts with --hostfile"
        ) from None
    for name in names:
        require_host_name(name, NODES_VARIABLE)
    return names


def _expand_entry(entry: str) -> Iterator[str]:
    parts = [
        [part["text"]] if part["text"] is not None else [number for item in part["ranges"].split(",") for number in _numbers(item)]
        for part in _PART.finditer(entry)
    ]
    return ("".join(chosen) for chosen in product(*parts))


def _numbers(item: str) -> list[str]:
    """Expand a range such as `08-10`, with numbers padded to the width of the first. Raises ValueError if it is malformed."""
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError
    first, last = match["first"], match["last"] or match["first"]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
