"""Processes of a sandbox: how they are started, counted, limited and ended."""

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROUNDS, _ROUND_SECONDS = 200, 0.005
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = resource.getpagesize()


def command(module: str) -> list[str]:
    """Return the command line that runs `main` of a module of fuligo in a Python without site packages."""
    folder = str(Path(__file__).parents[2])
    start = f"import sys; sys.path.append({folder!r}); from {module} import main; sys.path.remove({folder!r}); main()"
    return [sys.executable, "-s", "-P", "-S", "-c", start]


def environment() -> dict[str, str]:
    """Return the environment variables for a Python started by `command`. Of this process's variables, it gets only LD_LIBRARY_PATH."""
    return {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"} | {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


def run_first() -> None:
    """Give this process and its children real-time priority if permitted, so that a program with many processes cannot starve them.

    RLIMIT_NPROC does not limit the processes of root.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def run_last() -> None:
    """Give this process and its children a low priority, even if its parent called `run_first`."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(10)


def set_limits(limits: Mapping[int, int]) -> None:
    """Set soft and hard `resource.RLIMIT_*`, which this process cannot raise again; values above the old hard limit are lowered to it."""
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


@dataclass(frozen=True, slots=True)
class Process:
    """Entry of /proc."""

    pid: int
    parent: int
    cpu_s: float
    """CPU time of the process and of the children for which it waited."""
    resident_bytes: int
    is_running: bool
    """True unless the process ended and its parent has not waited for it yet."""


def children() -> list[int]:
    """Return the ids of this process's children, including ended ones that were not reaped."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread ended, or the kernel lacks CONFIG_PROC_CHILDREN
            found += map(int, (thread / "children").read_bytes().split())
    return found


def descendants() -> list[Process]:
    """Return the processes that this one started, directly or not; orphans are among them if it is a subreaper or an init."""
    children: dict[int, list[Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(os.getpid(), ()))
    for process in found:
        found += children.get(process.pid, ())
    return found


def _processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                cpu_s = sum(map(int, fields[11:15])) / _TICKS
                yield Process(int(entry.name), int(fields[1]), cpu_s, int(fields[21]) * _PAGE_BYTES, fields[0] != b"Z")


def is_init() -> bool:
    """Return whether this process is the first of a PID namespace, whose other processes all belong to the program."""
    return os.getpid() == 1


def num_others() -> int:
    """Return the number of other processes in this PID namespace."""
    return sum(entry.name.isdecimal() for entry in Path("/proc").iterdir()) - 1


def end_all() -> None:
    """Kill all descendants. The first process of a PID namespace does so by one call, which they cannot outrun by forking."""
    for _ in range(_ROUNDS):
        if is_init():
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        if not _kill(descendants()):
            return
        time.sleep(_ROUND_SECONDS)


def end_others(kept: int) -> bool:
    """Kill all descendants except `kept`; return whether no other one is left."""
    for _ in range(_ROUNDS):
        if not _kill([process for process in descendants() if process.pid != kept]):
            return True
        time.sleep(_ROUND_SECONDS)
    return False


def _kill(processes: list[Process]) -> int:
    """Kill processes, reap the ended ones, and return how many were still running."""
    for process in processes:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return sum(process.is_running for process in processes)
