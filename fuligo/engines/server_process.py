"""A server in a process of its own: started under a guard, watched, its log at hand, ended without remains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fuligo.errors import EngineError

POLL_S = 0.1
NUM_LOG_LINES = 20
GRACE_S = 10.0
"""For a server to end in good order."""


class ServerProcess:
    """A command under `engines.guard`. It ends with this process, however that ends.

    Args:
        name: for messages: `engine 3`, `router`
        log_file: stdout and stderr; appended to
        environment: variables beside this process's own
        grace_s: from asking it to end to forcing it
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._grace_s = grace_s
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fuligo.engines.guard", str(grace_s), *command],
                stdin=subprocess.PIPE,  # open as long as this process lives
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                process_group=0,  # Ctrl-C in a terminal reaches this process alone
            )

    @property
    def pid(self) -> int:
        """Of the guard."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def check_alive(self) -> None:
        """
        Raises:
            EngineError: it has ended; carries the last lines of its log
        """
        if not self.alive:
            raise EngineError(f"{self.name} {self._ending()}; its log ({self.log_file}) ends:\n{last_lines(self.log_file)}")

    async def wait_until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float, *, what: str | None = None) -> None:
        """Return when `ready` says so.

        Args:
            what: has not happened when the deadline passes; by default that the server was ready

        Raises:
            EngineError: the process ended before, or the deadline passed; carries the last lines of its log
        """
        deadline = time.monotonic() + timeout_s
        while not await ready():
            self.check_alive()
            if time.monotonic() > deadline:
                missed = what or f"{self.name} was not ready"
                raise EngineError(f"{missed} within {timeout_s:g} s; its log ({self.log_file}) ends:\n{last_lines(self.log_file)}")
            await asyncio.sleep(POLL_S)

    async def ended(self) -> None:
        """Return when it has."""
        while self.alive:  # noqa: ASYNC110  # nothing tells when a process ends but asking
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Returns when it and all that it started are gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(2 * self._grace_s + 5.0):  # the guard asks, then forces, each for one grace
                await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()

    def _ending(self) -> str:
        code = self._process.returncode
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "was killed, for want of memory or by itself after an error"
        return f"ended with exit code {code}"


def last_lines(log_file: Path) -> str:
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])
