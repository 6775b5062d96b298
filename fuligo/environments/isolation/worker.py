"""Process of one episode at a time, which serves the calls that arrive on its socket."""

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuligo.environments.environment import Environment, describe_error, json_copy
from fuligo.environments.isolation.messages import HEADER, FailureError, Reply, Request, encode_start, encode_step
from fuligo.environments.load import EnvironmentFactory
from fuligo.sandbox import processes

MARK = "1000"
"""Largest `oom_score_adj`: if memory runs out, the kernel kills an episode rather than the run. Child processes inherit it."""
_POOL = "asyncio"
"""Name prefix of the threads of asyncio.to_thread, which stay alive for later calls."""


def set_mark() -> None:
    """Mark this process as the process of an episode."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(MARK)


def mark(pid: int) -> str:
    """Return MARK for the process of an episode and its child processes, another text for other processes."""
    try:
        return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
    except OSError:
        return ""


class _Pool(ThreadPoolExecutor):
    """Threads of asyncio.to_thread."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix=_POOL)
        self.calls: set[Future[Any]] = set()
        """Calls that have not returned, including calls that are no longer awaited."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(fn, *args, **kwargs)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return call


async def serve(connection: socket.socket, factory: EnvironmentFactory, withheld: frozenset[str]) -> None:
    """Serve one episode after another until the run closes the connection.

    `withheld`: names of environment variables that the run did not hand over.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    await loop.create_connection(lambda: _Server(factory, withheld, ended), sock=connection)
    await ended


class _Server(asyncio.Protocol):
    """Connection to the run. Each request is answered by a task, so that it can be canceled."""

    def __init__(self, factory: EnvironmentFactory, withheld: frozenset[str], ended: asyncio.Future[None]) -> None:
        self._factory = factory
        self._withheld = withheld
        self._ended = ended
        self._received = bytearray()
        self._environment: Environment | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._transport: Any = None
        self._main = asyncio.current_task()
        self._pool = _Pool()
        asyncio.get_running_loop().set_default_executor(self._pool)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.max_size = 1 << 14  # bytes per read; asyncio would allocate 256 KiB for each
        transport.write(Reply(0, {"pid": os.getpid()}).encode())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= HEADER.size:
            (length,) = HEADER.unpack_from(received)
            end = HEADER.size + length
            if len(received) < end:
                return
            request = pickle.loads(bytes(memoryview(received)[HEADER.size : end]))
            del received[:end]
            self._handle(request)

    def _handle(self, request: Request) -> None:
        if request.name == "cancel":
            for call in self._calls:
                call.cancel()
            self._transport.write(Reply(request.number, {}).encode())
            return
        call = asyncio.ensure_future(self._answer(request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, request: Request) -> None:
        """Make a call and send its result. A SystemExit of the environment is a failure like any other exception."""
        try:
            reply = (await self._call(request)).encode()
        except asyncio.CancelledError:
            reply = Reply(request.number, {}, f"{request.name} canceled itself").encode()  # nobody reads it if the run canceled the call
        except FailureError as failure:
            reply = Reply(request.number, {}, str(failure)).encode()
        except BaseException as error:
            reply = Reply(request.number, {}, f"{request.name} raised {self._describe(error)}").encode()
        self._transport.write(reply)

    async def _call(self, request: Request) -> Reply:
        number = request.number
        if request.name == "close":
            environment, self._environment = self._environment, None
            if environment is not None:
                await environment.close()
            return Reply(number, {"is_reusable": self._is_reusable()})
        if request.name == "step":
            assert self._environment is not None and request.turn is not None
            step = await self._environment.step(request.turn)
            reply = Reply(number, encode_step(step))
            return reply if step.done or request.turn.last else self._with_state(reply)
        environment = self._make(request)
        if request.name == "restore":
            await environment.restore(request.state)
            return Reply(number, {})
        return self._with_state(Reply(number, encode_start(await environment.reset())))

    def _make(self, request: Request) -> Environment:
        assert request.row is not None
        try:
            self._environment = self._factory.make(request.row)
        except BaseException as error:
            raise FailureError(f"the constructor raised {self._describe(error)}") from None
        return self._environment

    def _with_state(self, reply: Reply) -> Reply:
        environment = self._environment
        if environment is None or not environment.resumable:
            return reply
        try:
            return Reply(reply.number, reply.result, state=json_copy(environment.state()))
        except BaseException as error:
            return Reply(reply.number, reply.result, state_failure=f"state raised {self._describe(error)}")

    def _is_reusable(self) -> bool:
        """Return whether the episode left no task, thread or child process behind."""
        tasks = asyncio.all_tasks() - {asyncio.current_task(), self._main}
        threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        busy = [thread for thread in threads if not thread.name.startswith(f"{_POOL}_")]
        return not tasks and not busy and not self._pool.calls and not processes.children()

    def _describe(self, error: BaseException) -> str:
        text = describe_error(error)
        if isinstance(error, KeyError) and error.args and error.args[0] in self._withheld:
            return f"{text}; the run withholds this variable (--environment-variables {error.args[0]} hands it over)"
        return text
