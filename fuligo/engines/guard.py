"""Runs a command so that nothing of it outlives the process that asked for it: `python -m fuligo.engines.guard GRACE_S COMMAND ...`.

Inference servers start processes of their own, and end them only when they end in good order. The guard stands between: it leads the
command's process group, adopts every orphan below it, and ends them all when the command ends, when it is told to stop (SIGTERM), or when
its standard input closes, which the kernel sees to however the asking process dies.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36
"""Linux, prctl(2): orphans below this process become its children."""


def main(command: Sequence[str], grace_s: float) -> int:
    """
    Args:
        grace_s: between asking processes to end and forcing them.

    Returns:
        The command's exit code; 128 + the signal where a signal ended it.
    """
    _adopt_orphans()
    asked_to_stop = _Flag()
    signal.signal(signal.SIGTERM, asked_to_stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this decides what Ctrl-C ends
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None and not asked_to_stop.value and not _parent_is_gone():
        pass
    code = _end(child, grace_s)
    return code if code >= 0 else 128 - code


class _Flag:
    value = False

    def set(self, *_: object) -> None:
        self.value = True


def _adopt_orphans() -> None:
    """Elsewhere than on Linux only the process group is ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _parent_is_gone() -> bool:
    """Waits a moment for standard input to close; nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """End the group, then whatever left it; returns the exit code of the command."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal_all(child.pid, number)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            child.poll()
            _reap(child.pid)
            if child.returncode is not None and not _group_exists(child.pid) and not _children():
                return child.returncode
            time.sleep(POLL_S)
    return child.wait()


def _signal_all(group: int, number: int) -> None:
    for send, target in ((os.killpg, group), *((os.kill, pid) for pid in _children())):
        try:
            send(target, number)
        except ProcessLookupError:
            continue


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(command_pid: int) -> None:
    """Take the exit codes of adopted processes; the command's own belongs to its Popen."""
    for pid in _children():
        if pid != command_pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _children() -> list[int]:
    """Of this process, adopted ones too; empty where /proc does not tell."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], float(sys.argv[1])))
