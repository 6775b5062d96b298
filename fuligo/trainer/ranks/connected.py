"""Ranks in other processes, reached through a connection: child processes of the driver, and processes started by torchrun.

A request is a header followed by a pickled command; a reply is a pickled pair of the command's number and its `Answer`.
"""

import asyncio
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fuligo.trainer.ranks.commands import Answer, R, SharedCommand
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.handle import RankHandle, RankLostError
from fuligo.trainer.ranks.signed import ForgedMessageError, SignedConnection

END_TIMEOUT_S = 10.0
"""Seconds that a rank's process has to exit after the driver closed the connection; then it is killed."""
EXIT_TIMEOUT_S = 5.0
"""Seconds to wait for the exit code of a rank's process after the rank closed the connection."""
NOTICED_WITHIN_MS = 500
"""Milliseconds to wait, before an error is sent, for the connection to close, as it does if the driver was killed."""
_HEADER = struct.Struct("!q?")
"""Number of the command, and its `is_queued`."""
RankConnection = Connection | SignedConnection
"""Connection whose peer has been verified to be a process of this run."""


class ConnectedRank(RankHandle):
    """Rank in another process, behind a connection.

    Args:
        process: process of the rank if the driver started it; None if torchrun did.
    """

    def __init__(self, rank: int, host: str, connection: RankConnection, process: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(rank, host)
        self._connection = connection
        self._process = process
        self._is_connected = True
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Answer[Any]]] = {}
        self._next_number = 0
        self._lost: RankLostError | None = None
        self._sender = ComputeThread(f"to-rank-{rank}")
        """Separate thread, because sending to a rank whose process is stopped blocks."""
        threading.Thread(target=self._receive_all, name=f"from-rank-{rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the process was started by torchrun"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the rank's process runs."""
        # `poll` returns None, as for a running process, while the receiving thread is in `wait`.
        return self._is_connected and self._process is not None and self._process.poll() is None

    async def run(self, command: SharedCommand[R]) -> Answer[R]:
        answered: Future[Answer[R]] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending[number] = answered
        await asyncio.wrap_future(self._sender.submit(partial(self._send, number, command)))
        return await asyncio.wrap_future(answered)

    async def close(self, *, failed: bool) -> None:
        if not failed:
            await self.leave()
        elif self._process is not None:
            self._process.kill()
        await asyncio.to_thread(self._end)

    def _send(self, number: int, command: SharedCommand[Any]) -> None:
        body = command.encoded(pickle.dumps)
        with suppress(OSError):  # the receiving thread reports the end of the connection
            self._connection.send_bytes(_HEADER.pack(number, command.command.is_queued))
            self._connection.send_bytes(body)

    def _receive_all(self) -> None:
        cause: Exception | None = None
        try:
            with closing(self._connection):
                while True:
                    self._receive()
        except (EOFError, OSError) as error:
            cause = error
        finally:
            self._is_connected = False
            lost = RankLostError(f"cannot be trusted: {cause}" if isinstance(cause, ForgedMessageError) else self._how_it_ended())
            with self._lock:
                self._lost = lost
                pending, self._pending = list(self._pending.values()), {}
            for answered in pending:
                if answered.set_running_or_notify_cancel():
                    answered.set_exception(lost)

    def _receive(self) -> None:
        """Deliver one answer. A separate method, so that the thread holds no reference to it while it waits for the next."""
        number, answer = pickle.loads(self._connection.recv_bytes())
        with self._lock:
            answered = self._pending.pop(number)
        if answered.set_running_or_notify_cancel():
            answered.set_result(answer)

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "closed its connection (its process has ended)"
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"ended with exit code {code}" + (" (killed, often because memory ran out)" if code == -9 else "")

    def _end(self) -> None:
        """Close the connection, which makes the rank exit; kill its process if it does not exit in time."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # unlike closing it, this wakes the receiving thread, which then closes it
        if self._process is None:
            return
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)


def start_process(rank: int, size: int, host: str) -> ConnectedRank:
    """Start a rank as a child process and return before it is ready. The child exits when this process does."""
    ours, theirs = socket.socketpair()
    arguments = ["--rank", str(rank), "--size", str(size), "--connection", str(theirs.fileno())]
    # In a separate process group, so that Ctrl-C in a terminal reaches only the driver, which then stops the ranks in order.
    process = subprocess.Popen(
        [sys.executable, "-m", "fuligo.trainer.ranks.rank_process", *arguments], process_group=0, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    return ConnectedRank(rank, host, Connection(ours.detach()), process)


def serve(connection: RankConnection, executor: RankExecutor) -> None:
    """Answer commands until the driver closes the connection after `LEAVE`.

    If the driver's process ends without `LEAVE`, exit this process at once, even if it hangs in a collective.
    """
    answer_commands(connection, executor)
    if not executor.rank.has_left:
        os._exit(1)


def answer_commands(connection: RankConnection, executor: RankExecutor) -> None:
    """Answer commands until the other end closes the connection."""
    # A separate thread, because sending to a driver whose process is stopped blocks, and other runs may share the compute thread.
    sender = ComputeThread(f"answers-of-rank-{executor.rank.number}")

    def send(number: int, answered: Future[Answer[Any]]) -> None:
        answer = answered.result()
        if answer.error is not None:
            sender.submit(partial(send_error, number, answer))
            return
        message = pickle.dumps((number, answer.for_driver(executor.rank.number)))  # before the next command changes the data it refers to
        sender.submit(partial(_send_answer, connection, message))

    def send_error(number: int, answer: Answer[Any]) -> None:
        # If the driver was killed, a collective fails first and the connection closes a moment later; the collective's error would mislead.
        ends = select.poll()
        ends.register(connection.fileno(), select.POLLRDHUP)
        if not ends.poll(NOTICED_WITHIN_MS):
            _send_answer(connection, pickle.dumps((number, answer.for_driver(executor.rank.number))))

    def serve_next() -> None:
        """Start one command. A separate function, so that the loop holds no reference to its samples while it waits for the next."""
        number, is_queued = _HEADER.unpack(connection.recv_bytes())
        command = connection.recv_bytes()
        executor.answer(lambda: pickle.loads(command), is_queued=is_queued).add_done_callback(partial(send, number))

    with suppress(EOFError, OSError):
        while True:
            serve_next()
    sender.stop()


def _send_answer(connection: RankConnection, message: bytes) -> None:
    with suppress(OSError):
        connection.send_bytes(message)
