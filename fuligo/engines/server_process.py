"""Server in its own process: started under a guard, watched, logged, and stopped with all its children."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.config.secret import Environment, Secret
from fuligo.engines import guard
from fuligo.errors import EngineError

MARK = "FULIGO_SERVER"
"""Environment variable that all processes of a server inherit, even those that leave its process group and session."""
ORPHANS_POLL_S = 0.05


def end_marked(mark: str, name: str, timeout_s: float) -> None:
    """Kill all processes whose environment has `FULIGO_SERVER=mark`; return when they have freed their memory. No-op without /proc.

    `name`: server's name for the error. Raises EngineError if some do not end in time, for instance because they hang in a driver.
    """
    deadline = time.monotonic() + timeout_s
    seen: set[tuple[int, str]] = set()
    while True:
        for pid in _marked(mark):  # repeatedly, since they may start others
            seen.add((pid, _start_time(pid) or ""))
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # A process that is ending loses its environment first and releases its devices later.
        running = [pid for pid, start_time in seen if start_time and _start_time(pid) == start_time]
        if not running:
            return
        if time.monotonic() > deadline:
            listed = ", ".join(map(str, sorted(running)))
            raise EngineError(
                f"cannot free the memory of {name}: some of its processes ({listed}) did not end within {timeout_s:g} s of SIGKILL; they "
                "hang in the kernel or a driver: look at dmesg, or restart the machine"
            )
        time.sleep(ORPHANS_POLL_S)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                yield int(directory.name)
        except OSError:  # it has ended, or belongs to another user
            continue


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, which distinguishes it from later ones with the same id; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


POLL_S = 0.1
NUM_LOG_LINES = 20
GRACE_S = 10.0
"""Seconds for a server to end after SIGTERM."""
ORPHANS_TIMEOUT_S = 60.0
"""Seconds for killed processes to end: the kernel first frees their memory, which may be terabytes."""


@dataclass(eq=False, repr=False)
class LoggedProcess:
    """Child process with a log, watched until it ends."""

    name: str
    """Name in messages: `engine 3`, `router`."""
    _process: subprocess.Popen[bytes]
    log_file: Path
    """File with its stdout and stderr."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def check_alive(self, advice: str = "") -> None:
        """Check that the process is running. Raises EngineError with the last lines of its log and `advice` if it has ended."""
        if not self.alive:
            code = self._process.returncode
            was_killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
            ending = "was killed (out of memory, or by itself after an error)" if was_killed else f"ended with exit code {code}"
            raise EngineError(f"{self.name} {ending}; its log ({self.log_file}) ends:\n{last_lines(self.log_file)}{advice}")

    async def wait_until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float, *, what: str | None = None) -> None:
        """Wait until `ready` returns True.

        `what`: start of the error message at the deadline; by default "NAME was not ready". Raises EngineError with the last lines of the
        log if the process ended, or the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        while not await ready():
            self.check_alive()
            if time.monotonic() > deadline:
                missed = what or f"{self.name} was not ready"
                raise EngineError(f"{missed} within {timeout_s:g} s; its log ({self.log_file}) ends:\n{last_lines(self.log_file)}")
            await asyncio.sleep(POLL_S)

    async def ended(self) -> None:
        while self.alive:  # noqa: ASYNC110  # Popen's process can only be polled
            await asyncio.sleep(POLL_S)

    async def terminate(self, timeout_s: float = 15.0) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`; return when the process has ended."""
        if self.alive:
            self._process.terminate()
        try:
            await asyncio.wait_for(self.ended(), timeout_s)
        except TimeoutError:
            self._process.kill()
            await self.ended()


class ServerProcess(LoggedProcess):
    """Command under `engines.guard`, which also ends when this process is killed. `stop` also ends processes that a killed guard left.

    Args:
        name, log_file: see `LoggedProcess`; the log is appended to
        environment: variables in addition to this process's environment
        grace_s: seconds between SIGTERM and SIGKILL
        secrets: texts that the guard hides in the log
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
        secrets: Sequence[str] = (),
    ) -> None:
        self._grace_s = grace_s
        # SGLang's processes rename themselves with setproctitle, which would overwrite the environment in /proc without SPT_NOENV.
        mark = {MARK: uuid.uuid4().hex, "SPT_NOENV": "1"}
        self._mark = mark[MARK]
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(grace_s), *command],  # the command's environment may lack fuligo
                stdin=subprocess.PIPE,  # open as long as this process lives
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), **mark, **guard.hiding(secrets)},
                process_group=0,  # Ctrl-C in a terminal reaches only this process
            )
        super().__init__(name, process, log_file)

    async def stop(self) -> None:
        """Stop the server; return when it and all its children have ended.

        Raises EngineError if some of them do not end and so keep memory that a new server needs.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(2 * self._grace_s + 5.0):  # the guard waits one grace period each after SIGTERM and SIGKILL
                await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()
        await asyncio.to_thread(end_marked, self._mark, self.name, ORPHANS_TIMEOUT_S)


def last_lines(log_file: Path) -> str:
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])


def secrets_of(arguments: Mapping[str, Any], environment: Environment) -> list[str]:
    """Return the secret values in a server's arguments and environment, which its log must not show."""
    values = [entry for value in arguments.values() for entry in (value if isinstance(value, list | tuple) else [value])]
    return [value.reveal() for value in values if isinstance(value, Secret)] + list(environment.secrets().reveal().values())
