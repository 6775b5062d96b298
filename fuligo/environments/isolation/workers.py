"""Pool of the processes of environments: started on demand, one episode each at a time, reused by later episodes."""

import asyncio
import logging
import os
import resource
import socket
import sys
from typing import Any

from fuligo.environments.isolation.messages import HEADER, MAX_MESSAGE_BYTES, FailureError, Reply, Request, decode_reply
from fuligo.environments.isolation.spawner import SpawnerSettings, process_variables
from fuligo.environments.isolation.spawner_process import SpawnerProcess
from fuligo.environments.threads import call_in_thread
from fuligo.quantities import count

logger = logging.getLogger(__name__)
_CANCEL_S = 2.0
"""Seconds in which a process must confirm that it canceled a call; a process that is busy computing cannot, and is killed."""
_CHUNK_BYTES = 1 << 14
_PAUSE_S, _RETRY_S = 0.005, 0.2


class ProcessEndedError(Exception):
    """Raised if the process of an episode has ended; the text says how."""


class Workers:
    """Pool of processes for the episodes of one environment class."""

    def __init__(self, path: str, settings: dict[str, Any], *, handed_over: tuple[str, ...] = (), memory_bytes: int | None = None) -> None:
        """Store --environment and its settings. No process starts before `start`.

        Args:
            handed_over: names of environment variables that the processes get even if their names suggest secrets
            memory_bytes: limit of the data of each process (RLIMIT_DATA); None: unlimited
        """
        variables, withheld = process_variables(handed_over, os.environ)
        self._spawner = SpawnerProcess(SpawnerSettings(path, settings, withheld, memory_bytes, os.getpid()), variables)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._num_starting = 0
        self._most = _most()
        """Largest number of processes; when one cannot be started, lowered to half of those that exist."""
        self._has_warned = False

    def start(self) -> None:
        """Start the process that the others are forked from; see `SpawnerProcess.start`."""
        self._spawner.start()

    async def take(self) -> "Worker":
        """Return a process for an episode: an idle one, or a new one. If no more can be started, wait until another episode ends.

        Raises FailureError if none can be started and none is in use.
        """
        while True:
            worker = self._idle_one()
            if worker is None and self._has_room(self._num_starting):
                worker = await self._started()
            if worker is not None:
                self._busy.add(worker)
                return worker
            if not self._has_warned:
                logger.warning("environment processes are limited to %d; further episodes wait; raise ulimit -n or -u", self._most)
                self._has_warned = True
            await asyncio.sleep(_RETRY_S)

    async def _started(self) -> "Worker | None":
        """Start a process; return None if that fails, or there is no room for it, while other processes exist.

        Raises FailureError if the process does not start and there is no other one to wait for.
        """
        self._num_starting += 1
        try:
            worker = await self._new()
        except FailureError as error:
            failure = error
        else:
            if self._has_room():
                return worker
            worker.kill()
            return None
        finally:
            self._num_starting -= 1
        # The run needs some of the files, processes and memory that just ran out: from now on, allow half as many processes.
        most = max(1, (len(self._busy) + len(self._idle) + self._num_starting) // 2)
        self._most = min(most, self._most)
        while self._num_starting and not (self._busy or self._idle):  # noqa: ASYNC110 - starting takes milliseconds
            await asyncio.sleep(_PAUSE_S)
        if not (self._busy or self._idle):
            raise failure
        if not self._has_warned:
            logger.warning("running %s; further ones wait: %s", count(len(self._busy), "episode"), failure)
            self._has_warned = True
        return None

    def _has_room(self, num_more: int = 0) -> bool:
        return len(self._busy) + len(self._idle) + num_more < self._most

    def _idle_one(self) -> "Worker | None":
        while self._idle:
            worker = self._idle.pop()
            if worker.is_idle():
                return worker
            worker.kill()
        return None

    def give_back(self, worker: "Worker") -> None:
        """Take back a process whose episode has ended."""
        self._busy.discard(worker)
        if self._has_room():
            self._idle.append(worker)
        else:
            worker.kill()

    def discard(self, worker: "Worker") -> None:
        """Kill a process that cannot be reused."""
        self._busy.discard(worker)
        worker.kill()

    def close(self) -> None:
        """End all processes."""
        for worker in (*self._idle, *self._busy):
            worker.close()
        self._idle.clear()
        self._busy.clear()
        self._spawner.end()

    async def _new(self) -> "Worker":
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            problem = f"{error.strerror}; raise the limit of open files (ulimit -n), or lower --rollout-concurrency"
            raise FailureError(f"cannot start its process: {problem}") from None
        with theirs:
            for _ in range(2):
                try:
                    await self._spawner.send_descriptor(theirs.fileno())
                    break
                except (BrokenPipeError, ConnectionResetError):
                    logger.warning("the process that starts environments ended; starting it again")
                    await call_in_thread(self._spawner.start, "start of environments")
            else:
                ours.close()
                raise FailureError("its process cannot be started: the process that starts it ended")
        ours.setblocking(False)
        worker = Worker(self._spawner, ours)
        try:
            await worker.greeting()
        except BaseException as error:
            worker.close()  # the process ends when its connection closes
            if isinstance(error, ProcessEndedError):
                raise FailureError(f"its process cannot be started: it {error}") from None
            raise
        return worker


class Worker:
    """Connection to a process that serves one episode at a time."""

    def __init__(self, spawner: SpawnerProcess, connection: socket.socket) -> None:
        self._spawner = spawner
        self._connection = connection
        self._received = bytearray()
        self._num_requests = 0
        self._awaited: int | None = None
        """Number of the request that has no reply yet; None if there is none."""
        self._is_broken = False
        """True if a request was sent in part, or a reply was malformed."""
        self._is_stuck = False
        """True if the process did not react to a cancellation."""
        self.is_open = True
        self.pid = 0

    async def greeting(self) -> None:
        """Wait until the process serves requests. Raises FailureError if it could not be started."""
        reply = await self._reply(0)
        self.pid = reply.result["pid"]

    async def call(self, **request: Any) -> Reply:
        """Send a request (fields of `Request` without its number) and return the reply.

        Raises FailureError if the environment failed, and ProcessEndedError if its process ended.
        """
        self._num_requests += 1
        number = self._num_requests
        data = Request(number, **request).encode()
        self._awaited = number
        self._is_broken = True
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, data)
        except OSError:
            raise ProcessEndedError(await self._ended()) from None
        self._is_broken = False
        reply = await self._reply(number)
        self._awaited = None
        return reply

    async def cancel(self) -> bool:
        """Cancel the call in progress, if there is one; return False if the process did not confirm that."""
        if self._awaited is None:
            return True
        if self._is_broken:
            return False
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self.call(name="cancel")
        except TimeoutError:
            self._is_stuck = True
            return False
        except (FailureError, ProcessEndedError):
            return False
        return True

    def is_idle(self) -> bool:
        """Return whether the process is alive and waits for requests: its connection is open and has no unread reply."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def kill(self) -> None:
        """Kill the process and the processes that it started."""
        if self.is_open:
            self._spawner.request_kill(self.pid, shows_stack=self._is_stuck)
            self.close()

    def close(self) -> None:
        """Close the connection, which ends an idle process."""
        self.is_open = False
        self._connection.close()

    async def _reply(self, number: int) -> Reply:
        """Return the reply to a request; drop replies to canceled ones. Raises FailureError if it is malformed or reports a failure."""
        while True:
            try:
                reply = decode_reply(await self._message())
            except FailureError:
                self._is_broken = True
                raise
            if reply.number != number:
                continue
            if reply.failure is not None:
                self._awaited = None
                raise FailureError(reply.failure)
            return reply

    async def _message(self) -> bytes:
        received, loop = self._received, asyncio.get_running_loop()
        while True:
            if len(received) >= HEADER.size:
                (length,) = HEADER.unpack_from(received)
                if length > MAX_MESSAGE_BYTES:
                    raise FailureError(f"its process sent a message of {length:,} bytes, more than {MAX_MESSAGE_BYTES:,}")
                end = HEADER.size + length
                if len(received) >= end:
                    body = bytes(memoryview(received)[HEADER.size : end])
                    del received[:end]
                    return body
            try:
                data = await loop.sock_recv(self._connection, _CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                raise ProcessEndedError(await self._ended())
            received += data

    async def _ended(self) -> str:
        status = await self._spawner.status(self.pid) if self.pid else "ended at its start"
        self.close()
        return status


def _most() -> int:
    """Return the largest number of processes: their connections may take a third of the open files (ulimit -n); the run needs the rest."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // 3)
