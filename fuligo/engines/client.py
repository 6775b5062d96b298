"""HTTP client of an engine, over SGLang's API. Requests and answers contain token ids; text is only for display."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, Unpack

import numpy as np

from fuligo.engines.answers import (
    Retryable,
    WeightLabel,
    encoded_images,
    parse_generation,
    parse_load,
    parse_routing,
    parse_scores,
    scoring_body,
)
from fuligo.engines.connection import DEFAULT, UNLIMITED, Connection, ControlDeadlines, Deadline, Overdue
from fuligo.engines.engine import MemoryTag, PauseMode
from fuligo.engines.generation import EngineLoad, Generation, ModelInfo, RequestOptions, SamplingParams
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import NO_KEYS, EngineKeys
from fuligo.formats.weight_manifest import AdapterPayload, WeightsDigest
from fuligo.models.vision.placing import collapsed
from fuligo.types import FloatArray, IntArray

T = TypeVar("T")
POLICY_ADAPTER = "policy"
"""Name of the trainer's adapter in engines that load adapters by name."""
IDLE_WITHIN_S = 30
"""Seconds that a cache flush waits for the step that is still in flight when the last request has been answered."""


@dataclass(eq=False, repr=False)
class EngineClient:
    """Implementation of `engine.InferenceEngine`, which documents the methods, over SGLang's HTTP API, which both backends serve."""

    url: str
    """Address of the engine or router, `http://HOST:PORT`."""
    keys: EngineKeys = NO_KEYS
    _: KW_ONLY
    retries: int = 3
    """Additional attempts after a connection error, a 5xx status or a malformed answer."""
    timeout_s: float = 600.0
    """Deadline of a generate or score request, over all attempts."""
    deadlines: ControlDeadlines = DEFAULT
    num_ranks: int = 1
    start: int = 0
    number: int | None = None
    adapter: str | None = None
    """Name of the LoRA adapter that requests use; None: the engine applies the weights and adapter that it holds."""
    run: str | None = field(default=None, init=False)
    is_overdue: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._connection = Connection(self.url, self.keys)

    async def generate(
        self,
        input_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        rid: str,
        was_aborted: Callable[[], bool] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        routing, images = options.get("routing"), options.get("images", ())
        body: dict[str, Any] = {
            # Thousands of requests wait at a time, and a list of numbers would take several times the memory of an array.
            "input_ids": np.ascontiguousarray(input_ids, np.int32),
            "sampling_params": params.to_json(),
            "return_logprob": True,
            "logprob_start_len": -1,
            "priority": options.get("priority", 0),
        }
        if images:
            body |= {"input_ids": np.array(collapsed(input_ids, images), np.int32), "image_data": encoded_images(images)}
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routing.num_known}

        async def attempt(body: dict[str, Any]) -> Generation:
            try:
                answer = await self._connection.request("POST", "/generate", body)
                generation = parse_generation(answer)
                if images and generation.prompt_tokens != len(input_ids):  # the engine expands image tokens itself
                    raise EngineError(
                        f"engine {self.url}: request {rid} has {len(input_ids)} tokens with its images, but the engine counts "
                        f"{generation.prompt_tokens}; its image processor or tokenizer differs from the trainer's; serve the same "
                        "checkpoint"
                    )
                if routing is not None:
                    # In a thread, because the experts of a long response are a hundred megabytes.
                    generation.routed_experts = await asyncio.to_thread(parse_routing, answer, routing, len(input_ids))
                return generation
            except ValueError as error:
                raise EngineError(f"engine {self.url}: malformed answer from /generate: {error}") from error
            except (Retryable, EngineError):
                if was_aborted is not None and was_aborted():
                    return Generation.aborted(len(input_ids))
                raise

        return await self._requested(rid, body, attempt, options.get("timeout_s"))

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
        async def attempt(body: dict[str, Any]) -> FloatArray:
            return parse_scores(await self._connection.request("POST", "/generate", body), input_ids[num_given:])

        return await self._requested(rid, scoring_body(input_ids, num_given), attempt, timeout_s)

    async def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await asyncio.wait_for(self._connection.request("GET", "/health"), max(0.1, min(5.0, deadline - time.monotonic())))
                return
            except (Retryable, EngineError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise EngineError(
                        f"engine {self.url} was not ready within {timeout_s:g} s; check its address and log; last error: {error!r}"
                    ) from error
                await asyncio.sleep(0.05)

    async def is_healthy(self, timeout_s: float | None = None) -> bool:
        return await self._succeeds("/health", timeout_s)

    async def scheduler_answers(self, timeout_s: float) -> bool:
        return await self._succeeds("/server_info", timeout_s)

    async def _succeeds(self, path: str, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection.request("GET", path)
        except (Retryable, EngineError, TimeoutError):
            return False
        return True

    async def model_info(self) -> ModelInfo:
        def parse(answer: Any) -> ModelInfo:
            label = WeightLabel.parse(answer["weight_version"])
            adapter = answer.get("adapter_digest", label.adapter)
            return ModelInfo(str(answer["model_path"]), label.version, answer.get("num_weight_loads"), adapter)

        return await self._read("/model_info", parse)

    async def read_num_ranks(self) -> None:
        self.num_ranks = await self._read("/server_info", lambda answer: int(answer["tp_size"]))

    async def load(self, *, retries: int | None = None) -> EngineLoad:
        return await self._read("/v1/loads", lambda answer: parse_load(answer["loads"]), retries=retries)

    async def pause(self, mode: PauseMode) -> None:
        await self._call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("/continue_generation", {})

    async def abort_all(self) -> None:
        await self._call("/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        await self._call("/flush_cache", {})

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        body = {"model_path": path, **self._of_bucket(version)}
        await self._call("/update_weights_from_disk", body, within=self.deadlines.weights, retries=0)

    async def update_weights_from_tensor(self, payloads: Sequence[str], version: int | None) -> None:
        body = {"serialized_named_tensors": list(payloads), **self._of_bucket(version)}
        await self._call("/update_weights_from_tensor", body, within=self.deadlines.bucket, retries=0)

    async def init_weights_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        store = {"master_address": host, "master_port": port}
        group = {"rank_offset": rank_offset, "world_size": world_size, "group_name": group_name, "backend": backend}
        await self._call("/init_weights_update_group", store | group, within=self.deadlines.bucket, retries=0)

    async def update_weights_from_distributed(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, version: int | None
    ) -> None:
        bucket = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name, "load_format": "flattened_bucket"}
        body = {**bucket, **self._of_bucket(version)}
        await self._call("/update_weights_from_distributed", body, within=self.deadlines.bucket, retries=0)

    async def receive_weight_stream(self, *, stream: int, group_name: str, version: int) -> None:
        # Without the plugin's hook, SGLang refuses this data type. Without any name, it would load nothing and report success.
        tensor = {"names": [str(stream)], "dtypes": ["fuligo_sync"], "shapes": [[]]}
        body = {**tensor, "group_name": group_name, "load_format": "fuligo_sync"}
        await self._call("/update_weights_from_distributed", body | self._of_bucket(version), within=UNLIMITED, retries=0)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._call("/destroy_weights_update_group", {"group_name": group_name}, retries=0)

    async def load_adapter(self, adapter: AdapterPayload, version: int) -> None:
        # The engine is paused, so no request uses the adapter.
        await self._replace_adapters([name for name in await self._adapters() if name == POLICY_ADAPTER], POLICY_ADAPTER, adapter)
        label = WeightLabel(version, self.number, await adapter.digest)
        await self._call("/update_weight_version", {"new_version": str(label), "abort_all_requests": False}, retries=0)

    async def _adapters(self) -> list[str]:
        """Return the names of the adapters in the engine, and of its base model."""
        return await self._read("/v1/models", lambda answer: [str(model["id"]) for model in answer["data"]])

    async def _replace_adapters(self, old: Iterable[str], name: str, adapter: AdapterPayload) -> None:
        """Load an adapter after unloading the old ones: SGLang cannot replace one, and unloads one only after the requests that use it.

        Each load of an adapter has its own entries in SGLang's KV cache: those of an earlier load are no longer found, and are evicted.
        """
        for loaded in old:
            await self._call("/unload_lora_adapter", {"lora_name": loaded}, within=self.deadlines.bucket, retries=0)
        body = {"lora_name": name, "config_dict": adapter.config, "serialized_tensors": await adapter.tensors}
        await self._call("/load_lora_adapter_from_tensors", body, within=self.deadlines.bucket, retries=0)

    async def weights_checksum(self) -> WeightsDigest:
        def parse(answer: Any) -> WeightsDigest:
            return WeightsDigest(int(answer["num_tensors"]), int(answer["num_bytes"]), str(answer["checksum"]))

        return await self._read("/weights_checker", parse, {"action": "checksum"}, within=self.deadlines.weights)

    async def release_memory(self, tag: MemoryTag | None = None) -> None:
        if tag != "weights":  # SGLang crashes if the step after the last answer is still in flight; a flush waits for it
            await self._call(f"/flush_cache?timeout={IDLE_WITHIN_S}", {}, within=self.deadlines.weights)
        await self._call("/release_memory_occupation", _tags(tag), within=self.deadlines.weights)

    async def resume_memory(self, tag: MemoryTag | None = None) -> None:
        await self._call("/resume_memory_occupation", _tags(tag), within=self.deadlines.weights)

    async def start_profile(self, directory: str, name: str) -> None:
        body = {"output_dir": directory, "profile_prefix": name, "activities": ["CPU", "GPU"], "with_stack": False}
        await self._call("/start_profile", body, within=self.deadlines.weights, retries=0)

    async def stop_profile(self) -> None:
        await self._call("/stop_profile", {}, within=self.deadlines.weights, retries=0)

    async def give_up(self) -> None:
        await self._connection.give_up()

    async def close(self) -> None:
        await self._connection.close()

    async def _requested(
        self, rid: str, body: dict[str, Any], attempt: Callable[[dict[str, Any]], Awaitable[T]], timeout_s: float | None
    ) -> T:
        """Send a generate or score request and return the result of `attempt`; a retry is sent as `<rid>.retry<n>`."""
        numbers = itertools.count()

        async def named() -> T:
            number = next(numbers)
            body["rid"] = f"{rid}.retry{number}" if number else rid
            return await attempt(body)

        within = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        return await self._connection.retried(f"request {rid}", named, self.retries, within)

    def _of_bucket(self, version: int | None) -> dict[str, Any]:
        """Return the version fields of a bucket; the last bucket sets the version and flushes the KV cache of the old weights."""
        return (
            {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": str(WeightLabel(version, self.number))}
        )

    async def _read(
        self,
        path: str,
        parse: Callable[[Any], T],
        body: dict[str, Any] | None = None,
        *,
        within: Deadline | None = None,
        retries: int | None = None,
    ) -> T:
        """Make a control call and return its parsed answer."""
        answer = await self._call(path, body, within=within, retries=retries)
        try:
            return parse(answer)
        except (KeyError, TypeError, ValueError, AttributeError, Retryable) as error:
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(f"engine {self.url}: malformed answer from {path} ({reason}): {answer!r:.200}") from error

    async def _call(
        self, path: str, body: dict[str, Any] | None = None, *, within: Deadline | None = None, retries: int | None = None
    ) -> Any:
        """Make a control call, a GET if it has no body, and return its answer.

        `within`: deadline; by default that of calls that the scheduler handles between two steps. Raises Overdue if no attempt
        succeeded in time, and EngineError if the engine refused the call, or all attempts failed.
        """
        method = "GET" if body is None else "POST"
        retries = self.retries if retries is None else retries
        within = within or self.deadlines.step
        try:
            answer = await self._connection.retried(path, lambda: self._connection.request(method, path, body), retries, within)
        except Overdue:
            self.is_overdue = True
            raise
        if isinstance(answer, dict) and answer.get("success") is False:
            reason = answer.get("message") or answer.get("error_message") or "no reason given"
            raise EngineError(f"engine {self.url} refused {path}: {reason}")
        return answer


def _tags(tag: MemoryTag | None) -> dict[str, Any]:
    return {} if tag is None else {"tags": [tag]}
