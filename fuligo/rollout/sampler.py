"""Execution of a GenerateFn within the concurrency and timeout of the run. An error fails only its sample."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike

from fuligo.engines.generation import SamplingParams
from fuligo.rollout.protocol import GenerateFn, Interruptible
from fuligo.types import Sample, SampleStatus

REFILL_SHARE = 1 / 16
"""Share of the turns that must be free before waiting samples get them; on average, half of this share is idle."""


class Turns:
    """Limit on the samples in generation, first come, first served; each sample enters it as an async context manager."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._refill = max(1, int(limit * REFILL_SHARE))
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._num_free and not self._waiting:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted just before the cancellation
                self._give_back()
            else:
                self._waiting.remove(turn)
                self._admit()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._num_free += 1
        self._admit()

    def _admit(self) -> None:
        """Admit waiting samples if enough turns are free for a refill, or for all of them."""
        if self._num_free < min(self._refill, len(self._waiting)):
            return
        while self._num_free and self._waiting:
            self._num_free -= 1
            self._waiting.popleft().set_result(None)


logger = logging.getLogger(__name__)

DEADLINE_SLACK = 1.01
"""Factor on the timeout, so that a request with the same timeout fails first, with an error that names the engine."""
NO_PROGRESS_PAUSE_S = 0.01
"""Pause before continuing a sample that was interrupted without a new token."""


@dataclass(eq=False)
class Sampler:
    """Wrapper of a GenerateFn that adds the limit on concurrency, a timeout, the seed and validation."""

    generate: GenerateFn
    """Default (`generate.SingleTurn`), or the one for an environment, an agent or a user's function."""
    _: KW_ONLY
    seed: int
    stream: str
    """Name of the random stream (`train`, `eval/<name>`), which separates samples of equal index."""
    turns: Turns
    """Limit on the samples generated at a time."""
    timeout_s: float
    """Timeout of one sample's generation, without the wait for its turn."""
    open: bool = field(default=True, init=False)
    """False: samples still waiting for their turn are returned unchanged."""

    def close(self) -> None:
        """Let samples that wait for their turn return unchanged, and interrupt an `Interruptible` GenerateFn."""
        self.open = False
        if isinstance(self.generate, Interruptible):
            self.generate.interrupt()

    async def sample(
        self, sample: Sample, params: SamplingParams, may_continue: Callable[[Sequence[Sample]], bool] | None = None
    ) -> list[Sample]:
        """Generate one sample until it is finished, failed or aborted; a GenerateFn may split it into several.

        With `may_continue`, interrupted responses continue at once, without giving up the turn. It is called with the samples so far
        before every request; if it returns False, they are returned.
        """
        async with self.turns:
            samples = [sample]
            progress_s = time.monotonic()
            while self.open and not all(part.finished for part in samples) and (may_continue is None or may_continue(samples)):
                before = _num_tokens(samples)
                parts = [[part] if part.finished else await self._generate_once(part, params) for part in samples]
                samples = [piece for part in parts for piece in part]
                if may_continue is None:
                    break
                if _num_tokens(samples) > before:
                    progress_s = time.monotonic()
                elif time.monotonic() - progress_s > self.timeout_s:
                    problem = f"interrupted repeatedly, without a new token for {self.timeout_s:g} s (--rollout-timeout-s)"
                    samples = [part if part.finished else failed(part, problem) for part in samples]
                else:
                    await asyncio.sleep(NO_PROGRESS_PAUSE_S)
            return samples

    async def _generate_once(self, sample: Sample, params: SamplingParams) -> list[Sample]:
        seeded = replace(params, sampling_seed=sampling_seed(self.seed, self.stream, sample.index))
        deadline = asyncio.timeout(self.timeout_s * DEADLINE_SLACK)
        try:
            async with deadline:
                result = await self.generate(sample, seeded)
            samples = result if isinstance(result, list) else [result]
            problem = _problem(samples)
        except Exception as error:
            samples = [sample]
            if isinstance(error, TimeoutError) and deadline.expired():
                problem = f"no response within {self.timeout_s:g} s (--rollout-timeout-s)"
            else:
                logger.warning("the generation of sample %d raised; marking it failed", sample.index, exc_info=True)
                problem = f"generation raised {type(error).__name__}: {error}"
        return samples if problem is None else [failed(sample, problem)]


def sampling_seed(rollout_seed: int, stream: str, index: int) -> int:
    """Return the seed of a sample, in [0, 2**63). The engine draws by absolute position, so a continued response keeps its stream."""
    digest = blake2b(f"{rollout_seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def failed(sample: Sample, reason: str) -> Sample:
    """Mark a sample failed; keep its response if it is well-formed."""
    sample.status, sample.error = SampleStatus.FAILED, reason
    if malformation(sample) is not None:
        clear_response(sample)
    return sample


def malformation(sample: Sample) -> str | None:
    """Return why a response is unusable (arrays of different lengths, non-finite numbers), or None."""
    lengths = {name: len(getattr(sample, name)) for name in ("response_ids", "loss_mask", "engine_logprobs", "versions")}
    if len(set(lengths.values())) > 1:
        return "malformed response, lengths differ: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
    if sample.routed_experts is not None and len(sample.routed_experts) >= max(len(sample.tokens), 1):
        return (
            f"malformed response: routed_experts covers {len(sample.routed_experts)} tokens, but the sample has {len(sample.tokens)} and "
            "its last token has no experts"
        )
    if sample.teacher_logprobs is not None and len(sample.teacher_logprobs) != sample.response_length:
        return f"malformed response: teacher_logprobs has {len(sample.teacher_logprobs)} of {sample.response_length} tokens"
    if not np.isfinite(sample.engine_logprobs).all():
        return "malformed response: a log-probability is not finite"
    if not np.isin(sample.loss_mask, (0, 1)).all():
        return "malformed response: loss_mask has values other than 0 and 1"
    return None


def append_tokens(sample: Sample, ids: ArrayLike, logprobs: ArrayLike, versions: ArrayLike, *, trained: bool) -> None:
    """Append tokens to the response; `logprobs` and `versions` hold one value per token, or one value for all of them."""
    ids = np.asarray(ids, np.int32)
    num_tokens = len(ids)
    sample.response_ids = np.concatenate([sample.response_ids, ids])
    sample.loss_mask = np.concatenate([sample.loss_mask, np.full(num_tokens, trained, np.int8)])
    sample.engine_logprobs = np.concatenate([sample.engine_logprobs, np.full(num_tokens, logprobs, np.float32)])
    sample.versions = np.concatenate([sample.versions, np.full(num_tokens, versions, np.int32)])


def clear_response(sample: Sample) -> None:
    sample.response_ids, sample.versions, sample.routed_experts = np.empty(0, np.int32), np.empty(0, np.int32), None
    sample.loss_mask, sample.engine_logprobs, sample.response = np.empty(0, np.int8), np.empty(0, np.float32), ""
    sample.teacher_logprobs = None


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.response_length for sample in samples)


def _problem(samples: list[Sample]) -> str | None:
    """Return why the samples that a GenerateFn returned cannot be used, or None."""
    if not samples:
        return "the generate function returned an empty list"
    for sample in samples:
        if sample.status is SampleStatus.PENDING:
            return "the generate function returned a pending sample; it must set the status, for instance SampleStatus.COMPLETED"
        if (problem := malformation(sample)) is not None:
            return problem
    return None
