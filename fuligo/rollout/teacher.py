"""The teacher's log-probabilities of finished samples, where an engine serves it (--use-opd): got while the reward judges."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Protocol

from fuligo.errors import EngineError
from fuligo.rollout.protocol import RewardFn
from fuligo.types import FloatArray, IntArray, Sample, SampleGroup, SampleStatus, Span


class Scorer(Protocol):
    """Serves the teacher; `engines.group.EngineGroup` does."""

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray: ...


class ServedTeacher:
    """Fills in `teacher_logprobs`. What goes wrong with one sample, after the retries, is that sample's failure.

    Args:
        scorer: where to ask
        timeout_s: deadline of one sample, its retries together
    """

    def __init__(self, scorer: Scorer, *, timeout_s: float) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._num_requests = itertools.count()

    async def __call__(self, group: SampleGroup) -> None:
        """Samples that are not finished, have failed, have no token, or know the teacher's log-probabilities stay as they are."""
        await asyncio.gather(*(self._score(sample) for sample in group.samples if _is_unscored(sample)))

    async def _score(self, sample: Sample) -> None:
        start_s = time.time()
        rid = f"teacher-{sample.index}-{next(self._num_requests)}"
        try:
            sample.teacher_logprobs = await self._scorer.score(sample.tokens, len(sample.prompt_ids), rid=rid, timeout_s=self._timeout_s)
        except EngineError as error:
            sample.status, sample.error = SampleStatus.FAILED, f"teacher: {error}"
        sample.spans.append(Span("teacher", start_s, time.time()))


class TaughtReward:
    """A `RewardFn` that has the teacher score meanwhile."""

    def __init__(self, reward: RewardFn, teacher: ServedTeacher) -> None:
        self._reward = reward
        self._teacher = teacher

    async def __call__(self, group: SampleGroup) -> None:
        teaching = asyncio.create_task(self._teacher(group))
        try:
            await self._reward(group)
            await teaching
        finally:
            teaching.cancel()  # of a group that is not rewarded nobody asks


def _is_unscored(sample: Sample) -> bool:
    answered = sample.finished and sample.status is not SampleStatus.FAILED
    return answered and sample.response_length > 0 and sample.teacher_logprobs is None
