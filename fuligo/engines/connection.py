"""HTTP session with one engine: deadlines, retries, and errors that name the engine and the call."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import aiohttp
import orjson

from fuligo.engines.answers import Retryable
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import CONTROL_VARIABLE, REQUESTS_VARIABLE, EngineKeys


class Overdue(EngineError):
    """Raised if no answer arrives before the deadline; whether the call took effect is unknown."""


class Deadline(NamedTuple):
    """Time limit of one call over all its attempts."""

    seconds: float
    flag: str = ""
    """Flag that raises the limit; empty if none does."""


UNLIMITED = Deadline(math.inf)
"""Deadline of calls that receive a stream of weights; their caller limits the time of each bucket."""


class ControlDeadlines(NamedTuple):
    """Deadlines by kind of call."""

    step: Deadline = Deadline(120.0)
    """Deadline of calls that the scheduler handles between two steps; longer than a step of SGLang, which prefills in chunks."""
    weights: Deadline = Deadline(600.0)
    """Deadline of calls that load all weights or move memory; equal to the time in which an engine must start."""
    bucket: Deadline = Deadline(300.0)
    """Deadline for loading a bucket of weights or joining a process group; far shorter than that of the trainer's ranks, which wait."""

    @classmethod
    def of_watched(cls, *, health_timeout_s: float, start_timeout_s: float) -> ControlDeadlines:
        """Return the deadlines of SGLang engines that the run started."""
        step = Deadline(max(DEFAULT.step.seconds, health_timeout_s), "--rollout-health-check-timeout")
        return cls(step, Deadline(start_timeout_s, "--engine-start-timeout-s"))

    @classmethod
    def of_others(cls, *, request_timeout_s: float, start_timeout_s: float) -> ControlDeadlines:
        """Return the deadlines of engines that this run did not start, and of the embedded engine, whose prefills are not chunked.

        A step may take as long as a request, because requests in a longer step fail anyway, but at most `start_timeout_s`.
        """
        weights = Deadline(start_timeout_s, "--engine-start-timeout-s")
        return cls(min(Deadline(request_timeout_s, "--rollout-timeout-s"), weights), weights)


DEFAULT = ControlDeadlines()


FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
SILENCE_S = 40
"""Seconds without an answer to any packet after which the connection to an engine's machine is dropped."""
CONNECT_TIMEOUT_S = 10.0
CONNECT_TO_GENERATE_TIMEOUT_S = 60.0
"""Timeout of connecting for `/generate`. When thousands of requests start at once, the server's accept queue overflows, and the kernel
reconnects after 1, 2, 4 s."""
_LENGTH_ADVICE = "; drop long prompts with --rollout-max-prompt-len, or ask for shorter responses (--rollout-max-response-len)"
"""Advice after SGLang's errors for requests that exceed the model's context length."""
_KEY_ADVICE = (
    f"the key is missing or wrong; if this run did not start the engine, set {REQUESTS_VARIABLE} to its key (SGLang: --api-key) and "
    f"{CONTROL_VARIABLE} to its key for control calls (--admin-api-key)"
)
T = TypeVar("T")


class Connection:
    """Connection to the engine at `url`, opened by the first request."""

    def __init__(self, url: str, keys: EngineKeys) -> None:
        self.url = url
        self._keys = keys
        self._is_given_up = False
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Make one HTTP request and return the JSON of the answer, or its text if it is not JSON (an error for `/generate`).

        Raises:
            Retryable: no connection, a 5xx status, or a malformed answer
            EngineError: the engine refused the request or was given up
        """
        if self._is_given_up:
            raise EngineError(f"cannot call {path} of engine {self.url}: the engine is lost")
        session = self._session
        if session is None:
            session = self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=_probing_socket),
                headers={"Content-Type": "application/json"},
            )
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        connect_s = CONNECT_TO_GENERATE_TIMEOUT_S if path == "/generate" else CONNECT_TIMEOUT_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        headers = self._keys.headers(method, path)
        try:
            async with session.request(method, self.url + path, data=data, headers=headers, timeout=timeout) as response:
                raw = await response.read()
                status = response.status
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Retryable(f"{type(error).__name__}: {error}") from error
        if status >= 500:
            raise Retryable(f"status {status}: {_error_text(raw)}")
        if status == 401:
            raise EngineError(f"engine {self.url}: {path} refused: {_KEY_ADVICE}")
        if status >= 400:
            reason = _error_text(raw)
            if path == "/generate" and "context length" in reason:
                reason = reason.removesuffix(".") + _LENGTH_ADVICE
            raise EngineError(f"engine {self.url}: {path} refused (status {status}): {reason}")
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if path == "/generate":
                raise Retryable(f"the answer is not JSON: {raw[:200]!r}") from error
            return raw.decode(errors="replace")

    async def retried(self, what: str, attempt: Callable[[], Awaitable[T]], retries: int, within: Deadline) -> T:
        """Return the result of `attempt`, which is repeated up to `retries` times after a `Retryable`.

        `what`: name of the call in errors. Raises Overdue if no attempt succeeded in time, and EngineError if all attempts failed.
        """
        cause: Retryable | None = None
        try:
            async with asyncio.timeout(within.seconds):
                for number in range(retries + 1):
                    try:
                        return await attempt()
                    except Retryable as error:
                        cause = error
                    if number < retries:
                        await asyncio.sleep(min(FIRST_BACKOFF_S * 2**number, MAX_BACKOFF_S))
        except TimeoutError as error:
            earlier = f"; last error: {cause}" if cause else ""
            longer = f"; raise {within.flag} to allow more" if within.flag else ""
            raise Overdue(f"engine {self.url}: {what}: no answer within {within.seconds:g} s{longer}{earlier}") from error
        times = f"{retries + 1} times; last error" if retries else "once"
        raise EngineError(f"engine {self.url}: {what}: failed {times}: {cause}") from cause

    async def give_up(self) -> None:
        """Fail all pending requests, and every later one immediately, because the engine is lost."""
        self._is_given_up = True
        await self.close()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _probing_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with keep-alive probes, because a lost machine does not close its connections."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _error_text(raw: bytes) -> str:
    """Return the message of an error answer, which SGLang writes in several shapes."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:500].decode(errors="replace")
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            return str(error.get("message", error))[:2000]
        return str(error)[:2000]
    return str(answer)[:500]
