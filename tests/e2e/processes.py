"""Processes of a run, as other processes see them, and waiting with a deadline."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.stand_ins import STAND_IN

POLL_S = 0.05
SHARED_MEMORY = Path("/dev/shm")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 240.0) -> None:
    """Wait until the condition holds; fail with `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


@contextmanager
def interrupt(*, ignored: bool = False) -> Iterator[None]:
    """Start processes with SIGINT's default action, or ignoring it, whatever this process does.

    Background jobs of a script and many CI runners ignore SIGINT, and what they start inherits that; a handler is not inherited.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def descendants(pid: int) -> dict[int, str]:
    """Return the command lines of the processes that `pid` started, then of those that they started, each generation by number."""
    children = defaultdict(list)
    for directory in Path("/proc").glob("[0-9]*"):
        child = int(directory.name)
        with suppress(OSError):
            state, parent = _state(child)
            if state != "Z":
                children[parent].append(child)
    found: dict[int, str] = {}
    generation = [pid]
    while generation:
        for process in generation:
            with suppress(OSError):
                found[process] = command_line(process)
                if found[process].startswith(STAND_IN):
                    children[process].append(int(found[process].removeprefix(STAND_IN)))
        generation = sorted(child for parent in generation for child in children[parent])
    found.pop(pid, None)
    return found


def alive(processes: dict[int, str]) -> dict[int, str]:
    """Return those of `descendants` that are still running. Their process ids may belong to other processes by now."""
    return {pid: command for pid, command in processes.items() if _is_running(pid, command)}


def command_line(pid: int) -> str:
    """Return the command line of a process, separated by spaces. It may hold any bytes.

    Raises:
        OSError: the process has ended.
    """
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


@contextmanager
def nothing_left_in_shared_memory(timeout_s: float = 60.0) -> Iterator[None]:
    """Fail if the block leaves files in /dev/shm. Files that other processes of the machine use do not count."""
    before = set(SHARED_MEMORY.iterdir())
    yield
    wait_until(lambda: not _new_files(before), "shared memory is given back", timeout_s)


def _new_files(before: set[Path]) -> set[Path]:
    own = {os.getpid(), *descendants(os.getpid())}
    others = [directory for directory in Path("/proc").glob("[0-9]*") if int(directory.name) not in own]
    inodes = {inode for directory in others for inode in _inodes_in_use(directory)}
    found = set()
    for file in set(SHARED_MEMORY.iterdir()) - before:
        with suppress(FileNotFoundError):
            if file.stat().st_ino not in inodes:
                found.add(file)
    return found


def _inodes_in_use(process: Path) -> Iterator[int]:
    """Yield the inodes of the files in /dev/shm that a process has mapped or open; a file may have got another name since."""
    with suppress(OSError):
        for line in (process / "maps").read_bytes().splitlines():
            if b" /dev/shm/" in line:
                yield int(line.split()[4])
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            if os.readlink(descriptor).startswith("/dev/shm/"):  # noqa: PTH115
                yield descriptor.stat().st_ino


def shared_memory(pids: list[int]) -> list[str]:
    """Return the names of the tensors in /dev/shm that these processes share."""
    return [path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(tuple(f"torch_{pid}_" for pid in pids))]


def _is_running(pid: int, command: str) -> bool:
    """Return whether a process runs this command; a zombie does not run."""
    try:
        return _state(pid)[0] != "Z" and command_line(pid) == command
    except OSError:
        return False


def _state(pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process, whose name may hold any bytes."""
    state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)
