"""Log-probabilities of a teacher that an engine serves (--use-opd), requested while rewards are computed."""

import asyncio
import itertools
import time
from dataclasses import KW_ONLY, dataclass, field

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError
from fuligo.rollout.judging import usable
from fuligo.rollout.protocol import RewardFn
from fuligo.types import Sample, SampleGroup, SampleStatus, Span


@dataclass(eq=False)
class ServedTeacher:
    """Scorer that sets `teacher_logprobs` of finished samples. A sample is marked failed if its request fails after all retries."""

    scorer: EngineGroup | InferenceEngine
    _: KW_ONLY
    timeout_s: float
    """Timeout of one sample, retries included."""
    _num_requests: itertools.count = field(default_factory=itertools.count, init=False)

    async def __call__(self, group: SampleGroup) -> None:
        """Score the samples of a group, except those that are unfinished, failed, empty or scored already."""
        await asyncio.gather(*(self._score(sample) for sample in usable(group.samples, rewarded=False) if sample.teacher_logprobs is None))

    async def _score(self, sample: Sample) -> None:
        start_s = time.time()
        rid = f"teacher-{sample.index}-{next(self._num_requests)}"
        try:
            sample.teacher_logprobs = await self.scorer.score(sample.tokens, len(sample.prompt_ids), rid=rid, timeout_s=self.timeout_s)
        except EngineError as error:
            sample.status, sample.error = SampleStatus.FAILED, f"teacher: {error}"
        sample.spans.append(Span("teacher", start_s, time.time()))


@dataclass(eq=False)
class RewardWithTeacher:
    """`RewardFn` that runs a reward and a teacher's scoring concurrently."""

    reward: RewardFn
    teacher: ServedTeacher

    async def __call__(self, group: SampleGroup) -> None:
        scoring = asyncio.create_task(self.teacher(group))
        try:
            await self.reward(group)
            await scoring
        finally:
            scoring.cancel()  # a group whose reward is canceled needs no scores
