"""Group of engines used as one: requests go to one of them, control calls to all."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar, Unpack

from fuligo.engines.client import EngineClient
from fuligo.engines.connection import DEFAULT, ControlDeadlines
from fuligo.engines.engine import InferenceEngine, MemoryTag, PauseMode
from fuligo.engines.generation import EngineLoad, Generation, ModelInfo, RequestOptions, SamplingParams, Served
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import NO_KEYS, EngineKeys
from fuligo.formats.weight_manifest import WeightsDigest
from fuligo.types import FloatArray, IntArray

T = TypeVar("T")
DIRECT_TIMEOUT_S = 600.0
"""Seconds that a request without a deadline waits for a restarted engine."""
WAIT_S = 0.1
"""Seconds between checks for a restarted engine."""
MAX_AHEAD = 8
"""Largest excess of an engine's requests in flight over the least busy engine's; beyond it, requests ignore affinity."""


class Membership(Protocol):
    """Supervisor of a group's engines, which restarts those that die; see `sglang.fleet.Fleet`."""

    async def is_lost(self, client: InferenceEngine) -> bool:
        """Return whether an engine whose call failed is dead or hangs, so that the others continue without it."""
        ...

    async def admit(self, clients: Sequence[InferenceEngine]) -> None:
        """Put restarted engines, which have the current weights, back into service."""

    @property
    def is_settled(self) -> bool:
        """True if no engine is being started or stopped, so that each holds exactly the memory that it was told to hold."""
        ...


@dataclass(slots=True)
class _Aborts:
    """Number of aborts, shared by a group and its `everyone`, since both abort the same requests."""

    number: int = 0


@dataclass(eq=False, repr=False)
class EngineGroup:
    """Several engines that serve the same weights, used like one."""

    clients: list[InferenceEngine]
    """All engines; control calls go to each of them."""
    router: InferenceEngine | None = None
    """Receives requests if given; otherwise the engines take turns."""
    _: KW_ONLY
    membership: Membership | None = None
    """Supervisor of the engines; None if nothing supervises them."""
    split: bool = False
    """True if prefill and decode are separate engines, which the router combines."""
    joining: list[InferenceEngine] = field(default_factory=list, init=False)
    """Restarted engines that wait for weights and get no requests."""
    served: Served = field(default_factory=Served, init=False)
    """Sums over all results of `generate`."""
    _aborts: _Aborts = field(default_factory=_Aborts)
    _num_direct: Counter[InferenceEngine] = field(default_factory=Counter, init=False)
    """Requests in flight that bypassed the router."""
    _num_lost: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.clients = list(self.clients)
        self._turn = itertools.cycle(enumerate(self.clients))

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        keys: EngineKeys = NO_KEYS,
        router_url: str | None = None,
        retries: int = 3,
        timeout_s: float = 600.0,
        deadlines: ControlDeadlines = DEFAULT,
    ) -> EngineGroup:
        """Return the group of the engines at `urls`, which have the same keys; nothing is sent yet."""
        clients = [EngineClient(url, keys, retries=retries, timeout_s=timeout_s, deadlines=deadlines) for url in urls]
        router = EngineClient(router_url, keys, retries=retries, timeout_s=timeout_s) if router_url else None
        return cls([*clients], router)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(client.url for client in self.clients)

    @property
    def everyone(self) -> EngineGroup:
        """New group of all current engines: those that serve, and restarted ones that wait for weights."""
        everyone = [*self.clients, *self.joining]
        return EngineGroup(everyone, self.router, membership=self.membership, split=self.split, _aborts=self._aborts)

    @property
    def is_settled(self) -> bool:
        return self.membership is None or self.membership.is_settled

    @property
    def answering(self) -> list[InferenceEngine]:
        """Clients that can answer by themselves: each engine, or the router if prefill and decode are split."""
        if self.split:
            return [self.router] if self.router is not None else []
        return list(self.clients)

    async def generate(
        self, input_ids: Sequence[int] | IntArray, params: SamplingParams, *, rid: str, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Sample one response; see `InferenceEngine.generate`."""

        async def attempt(client: InferenceEngine) -> Generation:
            # A request that a prefill engine hands over during an abort is answered with an error.
            num_before = self._aborts.number
            was_aborted = (lambda: self._aborts.number > num_before) if self.split else None
            return await client.generate(input_ids, params, rid=rid, was_aborted=was_aborted, **options)

        routing, timeout_s = options.get("routing"), options.get("timeout_s")
        if routing is None:
            number, generation = await self._call_next(attempt, timeout_s)
        else:
            number, generation = await self._call_by_affinity(attempt, routing.affinity, timeout_s)
        if generation.engine is None:
            generation.engine = number
        self.served = self.served.plus(generation)
        return generation

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
        """Score tokens; see `InferenceEngine.score`."""
        return (await self._call_next(lambda client: client.score(input_ids, num_given, rid=rid, timeout_s=timeout_s), timeout_s))[1]

    async def _call_next(self, call: Callable[[InferenceEngine], Awaitable[T]], timeout_s: float | None) -> tuple[int | None, T]:
        """Call the router or, without one, the engine whose turn it is; retry a request that failed while an engine was lost.

        Returns:
            Number of the engine (None: the router), and the answer.
        """
        while True:
            if self.membership is not None:
                await self._until_one_serves(timeout_s)
            number, client = (None, self.router) if self.router is not None else next(self._turn)
            num_lost = self._num_lost
            try:
                return number, await call(client)
            except EngineError:
                if self._num_lost == num_lost:
                    raise

    async def _call_by_affinity(
        self, call: Callable[[InferenceEngine], Awaitable[T]], affinity: int, timeout_s: float | None
    ) -> tuple[int | None, T]:
        """Call an engine directly, since the router drops the routing query. If the engine dies, retry on another.

        The affinity chooses the engine, unless another is much less busy. Return the engine's number and the answer.
        """
        while True:
            await self._until_one_serves(timeout_s)
            client = self.clients[affinity % len(self.clients)]
            idlest = min(self.clients, key=lambda other: self._num_direct[other])
            if self._num_direct[client] > self._num_direct[idlest] + MAX_AHEAD:
                client = idlest
            self._num_direct[client] += 1
            try:
                answer = await call(client)
            except EngineError:
                if self.membership is None or not await self.membership.is_lost(client):
                    raise
                self.remove(client)
            else:
                return self.clients.index(client) if client in self.clients else None, answer
            finally:
                self._num_direct[client] -= 1

    async def _until_one_serves(self, timeout_s: float | None) -> None:
        """Wait until an engine serves, if all are restarting. Raises EngineError if no engine restarted in time."""
        limit_s = DIRECT_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self.clients:
            if time.monotonic() >= deadline:
                raise EngineError(f"cannot send the request: all engines were lost and none restarted within {limit_s:g} s; see their logs")
            await asyncio.sleep(WAIT_S)

    async def wait_ready(self, timeout_s: float) -> None:
        await self._all(lambda client: client.wait_ready(timeout_s))

    async def read_num_ranks(self) -> None:
        await self._all(lambda client: client.read_num_ranks())

    async def model_infos(self) -> list[tuple[str, ModelInfo]]:
        """Return (URL, model info) of every engine."""

        async def ask(client: InferenceEngine) -> tuple[str, ModelInfo]:
            return client.url, await client.model_info()

        return await self._all(ask)

    async def load(self) -> EngineLoad:
        """Return the numbers of requests summed over the engines, without KV usage and throughput."""
        loads = await self._all(lambda client: client.load())
        arrived = [load.num_arrived for load in loads if load.num_arrived is not None]
        return EngineLoad(
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(arrived) if len(arrived) == len(loads) else None,
        )

    async def pause(self, mode: PauseMode) -> None:
        self._aborts.number += mode == "abort"
        await self._all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        await self._all(lambda client: client.resume())

    async def abort_all(self) -> None:
        self._aborts.number += 1
        await self.control(lambda everyone: everyone._all(lambda client: client.abort_all()))

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        await self._all(lambda client: client.update_weights_from_disk(path, version))

    async def weights_checksums(self) -> list[tuple[str, WeightsDigest]]:
        """Return (URL, checksum) of every engine's weights."""

        async def ask(client: InferenceEngine) -> tuple[str, WeightsDigest]:
            return client.url, await client.weights_checksum()

        return await self._all(ask)

    async def release_memory(self, tag: MemoryTag | None = None) -> None:
        await self._all(lambda client: client.release_memory(tag))

    async def resume_memory(self, tag: MemoryTag | None = None) -> None:
        await self._all(lambda client: client.resume_memory(tag))

    async def close(self) -> None:
        await self._all(lambda client: client.close())
        if self.router is not None:
            await self.router.close()

    async def admit(self, engines: Sequence[InferenceEngine]) -> None:
        """Put restarted engines, which have the current weights, back into service."""
        if engines:
            assert self.membership is not None, "engines restart only under a supervisor"
            self.joining = [client for client in self.joining if client not in engines]
            self.clients += engines
            await self.membership.admit(engines)

    async def control(self, call: Callable[[EngineGroup], Awaitable[object]]) -> None:
        """Make a control call to every engine, including those that wait for weights; no-op if all of them are lost."""
        everyone = self.everyone
        while True:
            try:
                await call(everyone)
                return
            except EngineError:
                if not await everyone.drop_lost():
                    raise

    async def drop_lost(self) -> bool:
        """Remove lost engines after a call that involved all of them failed; return whether there were any."""
        if self.membership is None:
            return False
        asked = list(self.clients)
        lost = await asyncio.gather(*(self.membership.is_lost(client) for client in asked))
        for client, is_lost in zip(asked, lost):
            if is_lost:
                self.remove(client)
        return any(lost)

    def remove(self, client: InferenceEngine) -> None:
        """Remove a lost engine from the group."""
        self._num_lost += client in self.clients
        self.clients = [other for other in self.clients if other is not client]
        self.joining = [other for other in self.joining if other is not client]

    async def _all(self, call: Callable[[InferenceEngine], Awaitable[T]]) -> list[T]:
        """Call all engines concurrently and return their answers; remove lost engines if others answered.

        Raises the first other error once all calls have ended.
        """
        asked = list(self.clients)
        answers = await asyncio.gather(*(call(client) for client in asked), return_exceptions=True)
        good = [answer for answer in answers if not isinstance(answer, BaseException)]
        for client, answer in zip(asked, answers):
            if not isinstance(answer, BaseException):
                continue
            if not good or self.membership is None or not await self.membership.is_lost(client):
                raise answer
            self.remove(client)
        return good
