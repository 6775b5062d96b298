"""Talking to inference engines: the one caller of the SGLang HTTP API.

Token ids go in and come out; text is for people.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from fuligo.engines.connection import Connection
from fuligo.engines.deadlines import DEFAULT, ControlDeadlines, Deadline, Overdue
from fuligo.engines.generation import (
    EngineLoad,
    Generation,
    ModelInfo,
    Retryable,
    RoutingQuery,
    SamplingParams,
    WeightLabel,
    parse_generation,
    parse_load,
    parse_routing,
)
from fuligo.engines.scoring import parse_scores, scoring_body
from fuligo.errors import EngineError
from fuligo.formats.checksum import WeightsDigest
from fuligo.types import FloatArray, IntArray, RoutedExperts

__all__ = ["EngineClient", "EngineLoad", "Generation", "ModelInfo", "PauseMode", "SamplingParams"]

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache"]
"""What of an engine's device memory."""


class EngineClient:
    """One engine.

    Args:
        url: `http://host:port`
        retries: further tries after a connection error, a 5xx status or a malformed answer
        timeout_s: deadline of a request for tokens, all its tries together
        deadlines: of the other calls
        num_ranks: tensor-parallel processes of the engine
        start: how often it was restarted before
        number: of the engine among those of the run: its answers carry it, for a router does not say who answered; None: it has none
    """

    def __init__(
        self,
        url: str,
        *,
        retries: int = 3,
        timeout_s: float = 600.0,
        deadlines: ControlDeadlines = DEFAULT,
        num_ranks: int = 1,
        start: int = 0,
        number: int | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.num_ranks = num_ranks
        self.start = start
        self.number = number
        self.retries = retries
        self.timeout_s = timeout_s
        self.deadlines = deadlines
        self.is_overdue = False
        """A call that is no request for tokens outlasted its deadline: nobody knows whether the engine still does what it was told."""
        self._connection = Connection(self.url)

    async def generate(
        self,
        input_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        was_aborted: Callable[[], bool] | None = None,
        routing: RoutingQuery | None = None,
    ) -> Generation:
        """Sample one response.

        Args:
            input_ids: [P] prompt, with the tokens generated so far where a response is continued
            rid: names the request in the engine; a retry is sent as `<rid>.retry<n>`
            priority: waiting requests start in descending order
            was_aborted: asked when a try fails: whether that is because all requests were aborted; then nothing was sampled
            routing: asks for the experts of the tokens, of the engine itself: a router drops the question

        Raises:
            EngineError: refused (400), no valid answer after the retries, none before the deadline, or one without the experts
        """
        body: dict[str, Any] = {
            # Thousands wait at a time: as a list of numbers a prompt takes several times the memory.
            "input_ids": np.ascontiguousarray(input_ids, np.int32),
            "sampling_params": params.to_json(),
            "return_logprob": True,
            "logprob_start_len": -1,
            "priority": priority,
        }
        if routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routing.num_known}
        tries = itertools.count()

        async def attempt() -> Generation:
            number = next(tries)
            body["rid"] = f"{rid}.retry{number}" if number else rid
            try:
                answer = await self._connection.request("POST", "/generate", body)
                generation = parse_generation(answer)
                if routing is not None:
                    generation.routed_experts = await self._routing(answer, routing, len(input_ids))
                return generation
            except (Retryable, EngineError):
                if was_aborted is not None and was_aborted():
                    return Generation.aborted(len(input_ids))
                raise

        return await self._connection.retried(f"request {rid}", attempt, self.retries, self._within(timeout_s))

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
        """[T - num_given] log-probabilities of all tokens after the first `num_given`, at least one, at temperature 1; none is sampled.

        Args:
            input_ids: [T]
            rid: as of `generate`

        Raises:
            EngineError: refused, no valid answer after the retries, or none before the deadline
        """
        body = scoring_body(input_ids, num_given)
        tries = itertools.count()

        async def attempt() -> FloatArray:
            number = next(tries)
            body["rid"] = f"{rid}.retry{number}" if number else rid
            return parse_scores(await self._connection.request("POST", "/generate", body), input_ids[num_given:])

        return await self._connection.retried(f"request {rid}", attempt, self.retries, self._within(timeout_s))

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the engine answers `/health`.

        Raises:
            EngineError: it did not within `timeout_s`
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await asyncio.wait_for(self._connection.request("GET", "/health"), max(0.1, min(5.0, deadline - time.monotonic())))
                return
            except (Retryable, EngineError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise EngineError(f"engine {self.url}: not ready within {timeout_s:g} s; last: {error!r}") from error
                await asyncio.sleep(0.05)

    async def is_healthy(self) -> bool:
        """`/health` answers, and with success."""
        try:
            await self._connection.request("GET", "/health")
        except (Retryable, EngineError):
            return False
        return True

    async def scheduler_answers(self, timeout_s: float) -> bool:
        """Whether it does within the time. In SGLang another process answers `/health`, and goes on where the scheduler waits for good."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection.request("GET", "/server_info")
        except (Retryable, EngineError, TimeoutError):
            return False
        return True

    async def model_info(self) -> ModelInfo:
        answer = await self._call("GET", "/model_info")
        try:
            return ModelInfo(str(answer["model_path"]), WeightLabel.parse(answer["weight_version"]).version)
        except (KeyError, TypeError, Retryable) as error:
            raise EngineError(f"engine {self.url}: /model_info answered {answer!r:.200}") from error

    async def learn_num_ranks(self) -> None:
        """Of an engine that somebody else started, `num_ranks` is what it says."""
        answer = await self._call("GET", "/server_info")
        try:
            self.num_ranks = int(answer["tp_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.url}: /server_info answered {answer!r:.200}, without tp_size") from error

    async def load(self, *, retries: int | None = None) -> EngineLoad:
        """
        Args:
            retries: by default those of every call
        """
        answer = await self._call("GET", "/v1/loads", retries=retries)
        try:
            return parse_load(answer["loads"])
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"engine {self.url}: /v1/loads answered {answer!r:.200}") from error

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding before the next step. Requests that arrive meanwhile wait.

        Args:
            mode: `abort` ends all requests with what they have; `retract` puts them back among the waiting; `in_place` keeps them
                and their KV cache where they are
        """
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def abort_all(self) -> None:
        """End every request; each returns what it has, with finish reason `abort`."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        await self._call("POST", "/flush_cache", {})

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load a Hugging Face directory that the engine can read; its shapes must be the model's."""
        body = {"model_path": path, "weight_version": self._label(version), "flush_cache": True}
        await self._call("POST", "/update_weights_from_disk", body, within=self.deadlines.weights, retries=0)

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], version: int | None, flush_cache: bool = True, load_format: str | None = None
    ) -> None:
        """Load one bucket of weights from shared memory.

        Args:
            payloads: `weights.payload.shared_payload`, one per tensor-parallel rank of the engine
            version: given with the last bucket only; the engine reports the new version from then on
            flush_cache: drop keys and values of the old weights; with the last bucket at the latest
        """
        body: dict[str, Any] = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": flush_cache}
        if version is not None:
            body["weight_version"] = self._label(version)
        await self._call("POST", "/update_weights_from_tensor", body, within=self.deadlines.bucket, retries=0)

    async def init_weights_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group from which `update_weights_from_distributed` will receive; returns when all its ranks are there.

        Args:
            host, port: of the TCPStore at rank 0, the sender
            rank_offset: of the engine's first rank; the others follow
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._call("POST", "/init_weights_update_group", body, within=self.deadlines.bucket, retries=0)

    async def update_weights_from_distributed(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, version: int | None
    ) -> None:
        """Receive one bucket as one row of bytes from rank 0 of the group; returns when it is loaded.

        Args:
            version: given with the last bucket only, which also drops keys and values of the old weights
        """
        body: dict[str, Any] = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": version is not None,
        }
        if version is not None:
            body["weight_version"] = self._label(version)
        await self._call("POST", "/update_weights_from_distributed", body, within=self.deadlines.bucket, retries=0)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": group_name}, retries=0)

    async def weights_checksum(self) -> WeightsDigest:
        """Checksum of the weights that the engine holds, as `weights.checksum` computes it."""
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"}, within=self.deadlines.weights)
        try:
            return WeightsDigest(int(answer["num_tensors"]), int(answer["num_bytes"]), str(answer["checksum"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.url}: /weights_checker answered {answer!r:.200}") from error

    async def release_memory(self, tag: MemoryTag | None = None) -> None:
        """Give back device memory of the idle engine: the KV cache, or weights (which are lost), by default both."""
        await self._call("POST", "/release_memory_occupation", _tags(tag), within=self.deadlines.weights)

    async def resume_memory(self, tag: MemoryTag | None = None) -> None:
        await self._call("POST", "/resume_memory_occupation", _tags(tag), within=self.deadlines.weights)

    async def give_up(self) -> None:
        """See `Connection.give_up`."""
        await self._connection.give_up()

    async def close(self) -> None:
        await self._connection.close()

    async def _routing(self, answer: Any, query: RoutingQuery, num_prompt_tokens: int) -> RoutedExperts:
        """In a thread: a long response's are a hundred megabytes."""
        try:
            return await asyncio.to_thread(parse_routing, answer, query, num_prompt_tokens)
        except ValueError as error:
            raise EngineError(f"engine {self.url}: {error}") from error

    def _label(self, version: int) -> str:
        return str(WeightLabel(version, self.number))

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, within: Deadline | None = None, retries: int | None = None
    ) -> Any:
        """A call that is no request for tokens; by default the scheduler does it between two steps."""
        retries = self.retries if retries is None else retries
        within = within or self.deadlines.step
        try:
            answer = await self._connection.retried(path, lambda: self._connection.request(method, path, body), retries, within)
        except Overdue:
            self.is_overdue = True
            raise
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"engine {self.url}: {path}: {answer.get('message', 'refused without a reason')}")
        return answer

    def _within(self, timeout_s: float | None) -> Deadline:
        """Of a request for tokens or their log-probabilities."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)


def _tags(tag: MemoryTag | None) -> dict[str, Any]:
    return {} if tag is None else {"tags": [tag]}
