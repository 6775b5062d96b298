"""Several engines as if they were one: requests go to one of them, control calls to all."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from fuligo.engines.client import EngineClient, MemoryTag, PauseMode
from fuligo.engines.deadlines import DEFAULT, ControlDeadlines
from fuligo.engines.generation import EngineLoad, Generation, ModelInfo, RoutingQuery, SamplingParams, Served
from fuligo.errors import EngineError
from fuligo.formats.checksum import WeightsDigest
from fuligo.types import FloatArray, IntArray

T = TypeVar("T")
DIRECT_TIMEOUT_S = 600.0
"""For an engine to come back, where the request has no deadline of its own."""
WAIT_S = 0.1
"""Between looks whether one has."""
MAX_AHEAD = 8
"""Requests that an engine may have more than the idlest one before affinity gives way to balance."""


class Membership(Protocol):
    """Who looks after the engines of a group: `engines.sglang.fleet.Fleet` is one."""

    async def is_lost(self, client: EngineClient) -> bool:
        """A control call to this engine failed: True where it is dead or hangs, and the others go on without it."""
        ...

    async def admit(self, clients: Sequence[EngineClient]) -> None:
        """They have the current weights: requests may reach them."""
        ...

    @property
    def is_settled(self) -> bool:
        """No engine is being started, and nothing is left of one that died: their memory is what is known of them."""
        ...


@dataclass(slots=True)
class _Aborts:
    """Of a group and of all that is its `everyone`: they end the same requests."""

    number: int = 0


class EngineGroup:
    """Several engines that serve the same weights, used like one.

    Args:
        clients: every engine; control calls go to all of them
        router: where given, requests go through it, else to the engines in turn
        membership: who comes and goes; without one, the engines are those that were given
        split: an engine prefills or decodes; the router makes a response of both
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        router: EngineClient | None = None,
        *,
        membership: Membership | None = None,
        split: bool = False,
    ) -> None:
        self.split = split
        self._aborts = _Aborts()
        self.clients = list(clients)
        self.router = router
        self.joining: list[EngineClient] = []
        """Restarted engines that wait for weights; no request reaches them."""
        self.membership = membership
        self.served = Served()
        """Everything that was answered to `generate`."""
        self._turn = itertools.cycle(enumerate(self.clients))
        self._num_direct: Counter[EngineClient] = Counter()
        """Requests under way that were sent past the router."""
        self._num_lost = 0

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        router_url: str | None = None,
        retries: int = 3,
        timeout_s: float = 600.0,
        deadlines: ControlDeadlines = DEFAULT,
    ) -> EngineGroup:
        """Clients of the engines at `urls`; nothing is sent yet."""
        clients = [EngineClient(url, retries=retries, timeout_s=timeout_s, deadlines=deadlines) for url in urls]
        router = EngineClient(router_url, retries=retries, timeout_s=timeout_s) if router_url else None
        return cls(clients, router)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(client.url for client in self.clients)

    @property
    def everyone(self) -> EngineGroup:
        """Who serves, and who was restarted and waits for weights, as they are now."""
        everyone = EngineGroup([*self.clients, *self.joining], self.router, membership=self.membership, split=self.split)
        everyone._aborts = self._aborts
        return everyone

    @property
    def is_settled(self) -> bool:
        return self.membership is None or self.membership.is_settled

    @property
    def answering(self) -> list[EngineClient]:
        """Who gives a response when asked alone: each engine; where prefill and decode are split the router, if it is known."""
        if self.split:
            return [self.router] if self.router is not None else []
        return list(self.clients)

    async def generate(
        self,
        input_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        routing: RoutingQuery | None = None,
    ) -> Generation:
        """See `EngineClient.generate`."""
        if routing is not None:
            generation = await self._generate_directly(input_ids, params, routing, rid=rid, priority=priority, timeout_s=timeout_s)
        else:
            generation = await self._generate_somewhere(input_ids, params, rid=rid, priority=priority, timeout_s=timeout_s)
        self.served = self.served.plus(generation)
        return generation

    async def _generate_somewhere(
        self, input_ids: Sequence[int] | IntArray, params: SamplingParams, *, rid: str, priority: int, timeout_s: float | None
    ) -> Generation:
        """Through the router, if there is one. A request that failed while an engine was lost is sent again: perhaps there was no other."""
        while True:
            if self.membership is not None:
                await self._until_one_serves(timeout_s)
            number, client = (None, self.router) if self.router is not None else next(self._turn)
            # What a pair is handing over when all is aborted has no answer but an error.
            num_aborts, num_lost = self._aborts.number, self._num_lost
            was_aborted = partial(self._aborted_since, num_aborts) if self.split else None
            try:
                generation = await client.generate(
                    input_ids, params, rid=rid, priority=priority, timeout_s=timeout_s, was_aborted=was_aborted
                )
            except EngineError:
                if self._num_lost == num_lost:
                    raise
            else:
                if generation.engine is None:
                    generation.engine = number
                return generation

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
        """See `EngineClient.score`. As with `generate`, a request that failed while an engine was lost is sent again."""
        while True:
            if self.membership is not None:
                await self._until_one_serves(timeout_s)
            client = self.router if self.router is not None else next(self._turn)[1]
            num_lost = self._num_lost
            try:
                return await client.score(input_ids, num_given, rid=rid, timeout_s=timeout_s)
            except EngineError:
                if self._num_lost == num_lost:
                    raise

    def _aborted_since(self, num_aborts: int) -> bool:
        return self._aborts.number > num_aborts

    async def _generate_directly(
        self,
        input_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        routing: RoutingQuery,
        *,
        rid: str,
        priority: int,
        timeout_s: float | None,
    ) -> Generation:
        """Past the router, which drops the question. A request whose engine dies goes to another."""
        while True:
            client = await self._by_affinity(routing.affinity, timeout_s)
            self._num_direct[client] += 1
            try:
                generation = await client.generate(input_ids, params, rid=rid, priority=priority, timeout_s=timeout_s, routing=routing)
            except EngineError:
                if self.membership is None or not await self.membership.is_lost(client):
                    raise
                self.remove(client)
            else:
                if generation.engine is None:
                    generation.engine = self.clients.index(client) if client in self.clients else None
                return generation
            finally:
                self._num_direct[client] -= 1

    async def _by_affinity(self, affinity: int, timeout_s: float | None) -> EngineClient:
        """The engine of these first tokens, unless it has much more to do than another. Where all are being restarted, wait for one.

        Raises:
            EngineError: no engine came back in time
        """
        await self._until_one_serves(timeout_s)
        client = self.clients[affinity % len(self.clients)]
        idlest = min(self.clients, key=lambda other: self._num_direct[other])
        return client if self._num_direct[client] <= self._num_direct[idlest] + MAX_AHEAD else idlest

    async def _until_one_serves(self, timeout_s: float | None) -> None:
        """Return when an engine serves: at once, but where all are being restarted.

        Raises:
            EngineError: no engine came back in time
        """
        limit_s = DIRECT_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self.clients:
            if time.monotonic() >= deadline:
                raise EngineError(f"all engines are gone, and none came back within {limit_s:g} s")
            await asyncio.sleep(WAIT_S)

    async def wait_ready(self, timeout_s: float) -> None:
        await self._all(lambda client: client.wait_ready(timeout_s))

    async def learn_num_ranks(self) -> None:
        """See `EngineClient.learn_num_ranks`."""
        await self._all(lambda client: client.learn_num_ranks())

    async def model_infos(self) -> list[tuple[str, ModelInfo]]:
        """Of every engine, with its URL."""

        async def ask(client: EngineClient) -> tuple[str, ModelInfo]:
            return client.url, await client.model_info()

        return await self._all(ask)

    async def load(self) -> EngineLoad:
        """The sum over the engines."""
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
        await self.tell(lambda everyone: everyone._all(lambda client: client.abort_all()))

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        await self._all(lambda client: client.update_weights_from_disk(path, version))

    async def weights_checksums(self) -> list[tuple[str, WeightsDigest]]:
        """Of every engine, with its URL."""

        async def ask(client: EngineClient) -> tuple[str, WeightsDigest]:
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

    async def admit(self, engines: Sequence[EngineClient]) -> None:
        """Restarted engines have the current weights and serve again."""
        if engines:
            assert self.membership is not None, "only a member restarts"
            self.joining = [client for client in self.joining if client not in engines]
            self.clients += engines
            await self.membership.admit(engines)

    async def tell(self, call: Callable[[EngineGroup], Awaitable[object]]) -> None:
        """A control call to everyone; where all are lost meanwhile, nobody has to be told."""
        everyone = self.everyone
        while True:
            try:
                await call(everyone)
                return
            except EngineError:
                if not await everyone.drop_lost():
                    raise

    async def drop_lost(self) -> bool:
        """Something failed that all engines had a part in: remove those that are lost; whether there were any."""
        if self.membership is None:
            return False
        asked = list(self.clients)
        lost = await asyncio.gather(*(self.membership.is_lost(client) for client in asked))
        for client, is_lost in zip(asked, lost):
            if is_lost:
                self.remove(client)
        return any(lost)

    def remove(self, client: EngineClient) -> None:
        """It is dead: nothing is sent to it any more."""
        self._num_lost += client in self.clients
        self.clients = [other for other in self.clients if other is not client]
        self.joining = [other for other in self.joining if other is not client]

    async def _all(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Every engine at once; all have answered when the first error is raised. Lost engines are passed over while others are left."""
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
