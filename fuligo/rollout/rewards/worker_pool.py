"""Pool of reward workers: processes that start when first needed and are replaced if they hang or die."""

import asyncio
import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fuligo.errors import RewardError
from fuligo.limits import num_cores

_SCRIPT = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 120.0
"""Seconds in which a worker must be ready. Importing sympy takes about a second, and much longer on a loaded machine."""
_GRACE_S = 5.0
"""Extra seconds that the parent waits. The worker's alarm normally ends the worker at the deadline, but may be late on a loaded machine."""


class NoVerdictError(RewardError):
    """Raised if a judge hangs, dies or runs out of memory. The response counts as wrong, so that policies do not learn to hang it."""


class WorkerDiedError(Exception):
    """Raised if a worker process ends during a request."""


class Worker:
    """One worker process, which answers one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._killed = False

    @classmethod
    async def start(cls, judge: Path) -> Self:
        """Start a process and wait until it has imported its judge. Raises RewardError if it ended or was not ready in time."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # otherwise the script's directory would shadow modules of the standard library
            str(_SCRIPT),
            str(judge),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await worker._read()
        except (TimeoutError, WorkerDiedError) as error:
            await worker.kill()
            late = f"did not start within {_START_TIMEOUT_S:g} s"
            what = late if isinstance(error, TimeoutError) else f"ended with exit code {process.returncode} while importing its judge"
            raise RewardError(f"a reward worker {what}") from error
        except asyncio.CancelledError:
            worker.kill_now()
            raise
        if "error" in ready:
            await worker.kill()
            raise RewardError(ready["error"])
        return worker

    async def ask(self, request: dict[str, Any], timeout_s: float) -> bool:
        """Return the verdict on a request.

        Raises NoVerdictError if time or memory ran out, RewardError if the judge raised, WorkerDiedError if the process died otherwise.
        """
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                message = {**request, "timeout_s": timeout_s}
                assert self._process.stdin is not None
                try:
                    self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
                    await self._process.stdin.drain()
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise WorkerDiedError from error
                reply = await self._read()
        except (TimeoutError, WorkerDiedError) as error:
            await self.kill()
            if isinstance(error, TimeoutError) or self._process.returncode == -signal.SIGALRM:
                raise NoVerdictError(f"no verdict within {timeout_s:g} s (--rm-timeout-s)") from None
            raise
        if "error" in reply:
            failure = NoVerdictError if reply["exhausted"] else RewardError
            raise failure(f"cannot judge the response: {reply['error']}")
        return bool(reply["verdict"])

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._killed

    async def kill(self) -> None:
        self.kill_now()
        await self._process.wait()

    def kill_now(self) -> None:
        if self.alive:
            self._killed = True
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            await self._process.wait()
            raise WorkerDiedError
        return json.loads(line)


class WorkerPool:
    """Pool of at most `num_workers` processes with one judge. A request waits for a free process; only then does its timeout start."""

    def __init__(self, judge: str, num_workers: int | None, timeout_s: float) -> None:
        """Store the settings; no process starts before the first request.

        Args:
            judge: file next to this one with `prepare()` and `judge(**request) -> bool`.
            num_workers: maximum number of processes; None: one per core, at most 4.
            timeout_s: seconds per request.
        """
        self._judge = Path(__file__).with_name(judge)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(num_workers or min(4, num_cores()))
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._has_started = False
        self._failed_start: RewardError | None = None
        """Error of the first worker's start. It is raised for later requests at once: starting others would fail after seconds each."""

    async def ask(self, **request: Any) -> bool:
        """Return the judge's verdict.

        Raises NoVerdictError if time or memory ran out, or two processes died, and RewardError if no process started, or the judge raised.
        """
        async with self._slots:
            for last_try in (False, True):
                try:
                    worker = self._pop_idle() or await self._start()
                    self._busy.add(worker)
                    try:
                        return await worker.ask(request, self._timeout_s)
                    except asyncio.CancelledError:
                        worker.kill_now()  # otherwise its reply would be read as the next request's
                        raise
                    finally:
                        self._busy.discard(worker)
                        if worker.alive:
                            self._idle.append(worker)
                except WorkerDiedError as error:
                    if last_try:
                        raise NoVerdictError("two reward workers died on this response") from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Kill all processes."""
        workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            await worker.kill()

    async def _start(self) -> Worker:
        if self._failed_start is not None:
            raise RewardError(str(self._failed_start))
        try:
            worker = await Worker.start(self._judge)
        except RewardError as failure:
            if not self._has_started:
                self._failed_start = failure
            raise
        self._has_started = True
        return worker

    def _pop_idle(self) -> Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        return None
