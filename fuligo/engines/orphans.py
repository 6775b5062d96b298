"""Processes of a server that outlived its guard: found by a mark in their environment and ended, so that nothing starts beside them."""

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from fuligo.errors import EngineError

MARK = "FULIGO_SERVER"
"""Variable that a server hands down to all its processes, also to those that left its process group and session."""
POLL_S = 0.05


def new_mark() -> dict[str, str]:
    """Return the variables that mark the processes of one server."""
    # SGLang's processes rename themselves with setproctitle, which would write over the variables that other processes see.
    return {MARK: uuid.uuid4().hex, "SPT_NOENV": "1"}


def end_marked(mark: str, name: str, timeout_s: float) -> None:
    """Kill all processes with this mark; return when they have ended and released their memory. No-op without /proc.

    Args:
        name: server's name for the error

    Raises:
        EngineError: some have not ended in time, such as those that hang in a driver
    """
    deadline = time.monotonic() + timeout_s
    seen: set[tuple[int, str]] = set()
    while True:
        for pid in _marked(mark):  # again and again, since they may start others
            seen.add((pid, _birth(pid) or ""))
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # A process that ends loses its environment first and its devices later.
        running = [pid for pid, birth in seen if birth and _birth(pid) == birth]
        if not running:
            return
        if time.monotonic() > deadline:
            listed = ", ".join(map(str, sorted(running)))
            raise EngineError(
                f"cannot free the memory of {name}: its processes {listed} did not end within {timeout_s:g} s of SIGKILL; "
                "they hang in the kernel or a driver: look at dmesg, or restart the machine"
            )
        time.sleep(POLL_S)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                yield int(directory.name)
        except OSError:  # it has ended, or belongs to another user
            continue


def _birth(pid: int) -> str | None:
    """Return the start time of a process, which tells it from later ones with its number; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
