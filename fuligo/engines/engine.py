"""Contract of an inference engine: everything that the rest of the package requires of one.

Rollouts, weight sync, colocation and the teacher depend on this file, not on a backend. `client.EngineClient` implements it over HTTP.
Differences between backends that must be known before an engine runs are in `config.engine_capabilities`; each backend's `launch` starts
its engines (see `docs/add-an-engine.md`).
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, Unpack

from fuligo.engines.generation import EngineLoad, Generation, ModelInfo, RequestOptions, SamplingParams
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.weight_manifest import AdapterPayload, WeightsDigest
from fuligo.types import FloatArray, IntArray

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache"]
"""Part of an engine's device memory."""


class Engine(Protocol):
    """Engine that samples one continuation: an `InferenceEngine`, or a group of them."""

    async def generate(self, input_ids: IntArray, params: SamplingParams, *, rid: str, **options: Unpack[RequestOptions]) -> Generation: ...


class InferenceEngine(Protocol):
    """One running engine, or a router that passes requests on to several.

    Every call raises `EngineError` if the engine refuses it, cannot be reached, or does not answer before the call's deadline.
    """

    url: str
    keys: EngineKeys
    num_ranks: int
    """Tensor-parallel processes."""
    start: int
    """Number of times that the engine was restarted."""
    number: int | None
    """Index among the engines of the run; None if the run did not start it."""
    run: str | None
    """Name of the run whose adapter requests use, if several runs share the engine; None: only one run uses it."""
    is_overdue: bool
    """True once a control call missed its deadline: the engine's state (paused, memory, weights) is then unknown."""

    async def generate(
        self,
        input_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        rid: str,
        was_aborted: Callable[[], bool] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Sample one response.

        Args:
            input_ids: [P] prompt, followed by the tokens so far if a response is continued
            rid: request id in the engine; a retry is sent as `<rid>.retry<n>`
            was_aborted: called after a failed attempt; if it returns True, all requests were aborted and the result is empty
        """
        ...

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
        """Return [T - num_given] log-probabilities at temperature 1 of the tokens after the first `num_given` (at least 1)."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding before the next step; later requests wait.

        Args:
            mode: `abort` ends all requests with the tokens they have; `retract` returns them to the queue; `in_place` keeps them and
                their KV cache, also over an update of the weights if the engine has the capability `keeps_requests`: each token is
                then labeled with the version that sampled it, and later requests do not reuse KV cache of the old weights
        """

    async def resume(self) -> None:
        """Continue generation after `pause`."""

    async def abort_all(self) -> None:
        """End every request; each returns its tokens so far with finish reason `abort`."""

    async def flush_cache(self) -> None:
        """Drop all cached keys and values of the paused or idle engine."""

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load weights from a Hugging Face directory that the engine can read, set their version, and flush the KV cache."""

    async def update_weights_from_tensor(self, payloads: Sequence[str], version: int | None) -> None:
        """Load one bucket of weights from shared memory.

        Args:
            payloads: one `formats.payload.shared_payload` per tensor-parallel rank
            version: version of the weights, given with the last bucket, which also flushes the KV cache; None with earlier buckets
        """

    async def init_weights_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group for `update_weights_from_distributed`; return when all its ranks have joined.

        Args:
            host, port: address of the TCPStore of rank 0, the sender
            rank_offset: rank of the engine's first process; its other processes have the next ranks
        """

    async def update_weights_from_distributed(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, version: int | None
    ) -> None:
        """Receive one bucket from rank 0 of the group as a flat tensor of bytes, and load it; see `update_weights_from_tensor`."""

    async def receive_weight_stream(self, *, stream: int, group_name: str, version: int) -> None:
        """Receive all buckets of sync number `stream`, whose names are in the group's store, and load them. The caller limits the time.

        Only if all ranks of the engine announced in the store that they receive streams.
        """

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave a process group."""

    async def load_adapter(self, adapter: AdapterPayload, version: int) -> None:
        """Replace the adapter that requests use, drop the old adapter's KV cache, and set the version; the engine must be paused.

        Only with the capability `names_adapters`.
        """

    async def weights_checksum(self) -> WeightsDigest:
        """Return the checksum of the engine's weights; only with the capability `reports_checksum`."""
        ...

    async def release_memory(self, tag: MemoryTag | None = None) -> None:
        """Free device memory of the idle engine: the KV cache, the weights (lost unless the engine keeps a copy), or by default both."""

    async def resume_memory(self, tag: MemoryTag | None = None) -> None:
        """Allocate memory again after `release_memory`."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine is healthy. Raises EngineError if it is not healthy within `timeout_s`."""

    async def scheduler_answers(self, timeout_s: float) -> bool:
        """Return whether the scheduler, which can hang while the health check succeeds, answers in time. Never raises."""
        ...

    async def model_info(self) -> ModelInfo:
        """Return the served model and the version of its weights."""
        ...

    async def read_num_ranks(self) -> None:
        """Set `num_ranks` to what the engine reports; for engines that the run did not start."""

    async def load(self, *, retries: int | None = None) -> EngineLoad:
        """Return the current load. `retries`: further attempts after a failure; None: the same as for other calls."""
        ...

    async def start_profile(self, directory: str, name: str) -> None:
        """Start the engine's profiler; only with the capability `writes_profiles`.

        It writes traces, whose file names begin with `name`, to a directory on the engine's machine.
        """

    async def stop_profile(self) -> None:
        """Stop the profiler; return when the traces are written."""

    async def give_up(self) -> None:
        """Fail all pending requests, and every later one immediately, because the engine is lost."""

    async def close(self) -> None:
        """Close connections."""
