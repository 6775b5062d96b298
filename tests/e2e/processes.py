"""Processes of a run, seen from outside, and waiting for them with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.05


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


def descendants(pid: int) -> dict[int, str]:
    """Command lines of the processes that `pid` started, and of those that they started."""
    children = {child: command for child, (parent, command) in _processes().items() if parent == pid}
    return children | {grandchild: command for child in children for grandchild, command in descendants(child).items()}


def alive(pids: dict[int, str]) -> dict[int, str]:
    """Those of `descendants` that still run."""
    now = _processes()
    return {pid: command for pid, command in pids.items() if now.get(pid, (0, ""))[1] == command}


def shared_memory(pids: list[int]) -> list[str]:
    """Tensors in /dev/shm that these processes share."""
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(f"torch_{pid}_" for pid in pids))]


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and command line by process id; a process that has ended and waits for its parent is none."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if state != "Z":
            found[int(directory.name)] = int(parent), command
    return found
