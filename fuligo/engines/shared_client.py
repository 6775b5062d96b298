"""Client of an SGLang engine that several runs share: each run has its own adapter, whose name contains the version.

SGLang pauses, aborts and labels the requests of all runs together. A run's client therefore does this for its own requests: it holds back
new requests while the run's adapter changes, aborts requests in flight by id, and reads the version from the adapter's name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fuligo.engines.answers import WeightLabel
from fuligo.engines.client import EngineClient
from fuligo.engines.connection import Overdue
from fuligo.engines.engine import InferenceEngine, PauseMode
from fuligo.engines.generation import Generation, ModelInfo
from fuligo.errors import EngineError
from fuligo.formats.weight_manifest import AdapterPayload, EngineAddress
from fuligo.quantities import count

T = TypeVar("T")
ABORT_AGAIN_S = 0.2
"""Seconds between aborts; each catches requests that were on their way during the previous one."""


_LABEL = re.compile(r"\d+#[^/]+")
"""`WeightLabel` of a run's adapter in the name of the adapter: `2/40#DIGEST` is version 40 of run 2."""


@dataclass(slots=True)
class RunRequests:
    """State of one run's requests, shared by the clients through which the run samples."""

    run: str
    """Name of the run; part of its adapter's name and of its requests' ids."""
    label: WeightLabel | None = None
    """Adapter that requests use; None before the first sync."""
    in_flight: set[str] = field(default_factory=set)
    """Ids of requests that were sent and are not answered yet."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the run has paused the engines."""

    def __post_init__(self) -> None:
        self.may_start.set()


class SharedEngineClient(EngineClient):
    """`EngineClient` of one of several runs that share an engine or a router. `given`: arguments of `EngineClient`."""

    def __init__(self, url: str, requests: RunRequests, **given: Any) -> None:
        super().__init__(url, **given)
        self.run: str | None = requests.run
        self._requests = requests

    async def pause(self, mode: PauseMode) -> None:
        """Hold back the run's new requests. Mode `abort` also aborts requests in flight; the other modes let them finish.

        Raises Overdue if requests do not end in time after their abort.
        """
        self._requests.may_start.clear()
        if mode != "abort":
            return
        try:
            async with asyncio.timeout(self.deadlines.step.seconds):
                while self._requests.in_flight:
                    await self.abort_all()
                    await asyncio.sleep(ABORT_AGAIN_S)
        except TimeoutError as error:
            self.is_overdue = True
            raise Overdue(
                f"engine {self.url}: {count(len(self._requests.in_flight), 'request')} did not end within "
                f"{self.deadlines.step.seconds:g} s of the abort"
            ) from error

    async def resume(self) -> None:
        self._requests.may_start.set()

    async def abort_all(self) -> None:
        """Abort the run's requests in flight."""
        await asyncio.gather(*(self._call("/abort_request", {"rid": rid}) for rid in list(self._requests.in_flight)))

    async def flush_cache(self) -> None:
        """Do nothing: SGLang keys its cache by adapter and drops the entries with the adapter."""

    async def model_info(self) -> ModelInfo:
        """Return the model and the version of the run's adapter, which later requests use.

        Raises EngineError if the engine holds several adapters of the run.
        """
        path = await self._read("/model_info", lambda answer: str(answer["model_path"]))
        labels = await self._labels()
        if len(labels) > 1:
            raise EngineError(
                f"engine {self.url} holds {len(labels)} adapters of run {self.run} ({', '.join(map(self._name, labels))}), but a run may "
                "have only one; restart the engine"
            )
        self._requests.label = label = labels[0] if labels else None
        return ModelInfo(path, 0, None, None) if label is None else ModelInfo(path, label.version, None, label.adapter)

    async def load_adapter(self, adapter: AdapterPayload, version: int) -> None:
        label = WeightLabel(version, adapter=await adapter.digest)
        # The pause has ended requests that use the old one.
        await self._replace_adapters(map(self._name, await self._labels()), self._name(label), adapter)

    def _name(self, label: WeightLabel) -> str:
        return f"{self.run}/{label}"

    async def _labels(self) -> list[WeightLabel]:
        """Return the labels of the run's adapters in the engine."""
        parts = (name.partition("/") for name in await self._adapters())
        return [WeightLabel.parse(label) for run, _, label in parts if run == self.run and _LABEL.fullmatch(label)]

    async def _requested(
        self, rid: str, body: dict[str, Any], attempt: Callable[[dict[str, Any]], Awaitable[T]], timeout_s: float | None
    ) -> T:
        """Send a request with retries. Each attempt waits while the run is paused, then uses the run's current adapter."""
        requests = self._requests

        async def with_adapter(body: dict[str, Any]) -> T:
            await requests.may_start.wait()
            label = requests.label
            if label is None:
                raise EngineError(
                    f"engine {self.url}: cannot send request {rid}: run {self.run} has not synced an adapter yet; sync the weights first"
                )
            requests.in_flight.add(body["rid"])
            try:
                answer = await attempt({**body, "lora_path": self._name(label)})
            finally:
                requests.in_flight.discard(body["rid"])
            if isinstance(answer, Generation):
                answer.weight_version = label.version
            return answer

        return await super()._requested(f"{self.run}/{rid}", body, with_adapter, timeout_s)


def client_of(engine: EngineAddress) -> InferenceEngine:
    """Return a client through which a trainer rank sends weights to an engine."""
    if engine.run is None:
        return EngineClient(engine.url, engine.keys, number=engine.number)
    return SharedEngineClient(engine.url, RunRequests(engine.run), keys=engine.keys, number=engine.number)
