"""Duties of process 1 in a container (reaping orphans, forwarding signals), and waiting for the end of a parent process."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def continue_below_init() -> None:
    """Fork if this is process 1 and return in the child; process 1 waits for the child and exits with its exit code.

    Process 1 becomes the parent of every orphan, such as those of an engine or of a reward's programs. Unless it waits for them, ended
    orphans fill the process table.
    """
    if os.getpid() != 1:
        return
    signals = {number: signal.getsignal(number) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # signals that arrive before the handlers are set stay pending
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return
    for number, handler in signals.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: _pass_on(received, child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os._exit(_wait(child))


def _pass_on(number: int, child: int) -> None:
    """Send a signal to the child, unless the terminal has sent it to the whole foreground group."""
    if number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
        return
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _wait(child: int) -> int:
    """Reap every process that ends until the child does; return its exit code."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_with_parent(pid: int, end: Callable[[], None]) -> None:
    """Start a thread that calls `end` once the parent process `pid` has ended, however it ends."""

    def watch() -> None:
        _wait_for_end(pid)
        end()

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def _wait_for_end(pid: int) -> None:
    try:
        parent = os.pidfd_open(pid)
        select.select([parent], [], [])
    except ProcessLookupError:
        pass  # it has already exited
    except (AttributeError, OSError):  # no pidfd on this system
        while os.getppid() == pid:
            time.sleep(0.5)
