"""Served teacher: it scores finished samples beside the reward, and its failures are the sample's."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from fuligo.errors import EngineError, HookError
from fuligo.rollout.judging import usable
from fuligo.rollout.sampler import malformation
from fuligo.rollout.teacher import RewardWithTeacher, ServedTeacher
from fuligo.types import FloatArray, IntArray, Sample, SampleGroup, SampleStatus


def sample(index: int, status: SampleStatus = SampleStatus.COMPLETED, num_tokens: int = 3, **fields: object) -> Sample:
    ids = np.arange(num_tokens, dtype=np.int32) + 10 * index
    floats, mask = np.zeros(num_tokens, np.float32), np.ones(num_tokens, np.int8)
    return Sample(
        index, 0, "p", np.array([7, 8], np.int32), status=status, response_ids=ids, loss_mask=mask, engine_logprobs=floats, versions=ids,
        **fields,
    )  # fmt: skip


class Scorer:
    """Scorer that returns minus the token id, and refuses inputs with a given token."""

    def __init__(self, refused: int = -1) -> None:
        self.rids: list[str] = []
        self._refused = refused

    async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
        self.rids.append(rid)
        if self._refused in input_ids:
            raise EngineError("no answer within 5 s")
        return -input_ids[num_given:].astype(np.float32)


async def taught(group: SampleGroup, scorer: Scorer) -> None:
    async def reward(group: SampleGroup) -> None:
        for sample in group.samples:
            sample.reward = 1.0

    await RewardWithTeacher(reward, ServedTeacher(scorer, timeout_s=5.0))(group)


async def test_every_response_token_is_scored() -> None:
    """Samples split from one response share their index, and each request needs an id of its own."""
    scorer, group = Scorer(), SampleGroup(0, 0, [sample(1), sample(2), sample(2, num_tokens=5)])
    await taught(group, scorer)
    for each in group.samples:
        assert each.reward == 1.0
        np.testing.assert_array_equal(each.teacher_logprobs, -each.response_ids)
    assert len(set(scorer.rids)) == 3
    assert [span.name for span in group.samples[0].spans] == ["teacher"]


async def test_a_reward_that_fails_ends_the_scoring() -> None:
    under_way, ended = asyncio.Event(), asyncio.Event()

    class Endless(Scorer):
        async def score(self, input_ids: IntArray, num_given: int, *, rid: str, timeout_s: float | None = None) -> FloatArray:
            under_way.set()
            try:
                return await asyncio.Future()
            finally:
                ended.set()

    async def fails(group: SampleGroup) -> None:
        await under_way.wait()
        raise HookError("no such label")

    with pytest.raises(HookError):
        await RewardWithTeacher(fails, ServedTeacher(Endless(), timeout_s=5.0))(SampleGroup(0, 0, [sample(1)]))
    async with asyncio.timeout(120):
        await ended.wait()


async def test_unfinished_or_already_scored_samples_are_not_scored() -> None:
    known = np.full(3, -0.5, np.float32)
    others = [sample(2, SampleStatus.FAILED), sample(3, SampleStatus.ABORTED), sample(4, SampleStatus.TRUNCATED, 0)]
    scorer = Scorer()
    await taught(SampleGroup(0, 0, [done := sample(1, teacher_logprobs=known), *others]), scorer)
    assert scorer.rids == []
    assert done.teacher_logprobs is known and all(other.teacher_logprobs is None for other in others)


async def test_a_teacher_that_fails_fails_its_sample() -> None:
    group = SampleGroup(0, 0, [sample(1), sample(2)])
    await taught(group, Scorer(refused=20))
    assert usable(group.samples) == [group.samples[0]]
    assert group.samples[1].error == "teacher: no answer within 5 s"


async def test_reward_and_teacher_are_asked_at_the_same_time() -> None:
    """Reward and teacher each wait for the call of the other."""
    arrived = asyncio.Barrier(2)

    def waits(then: Callable[[], FloatArray | None]):
        async def call(*_: object, **__: object) -> FloatArray | None:
            await arrived.wait()
            return then()

        return call

    scorer = Scorer()
    scorer.score = waits(lambda: np.zeros(3, np.float32))
    group = SampleGroup(0, 0, [sample(1)])
    async with asyncio.timeout(120):
        await RewardWithTeacher(waits(lambda: None), ServedTeacher(scorer, timeout_s=5.0))(group)
    assert group.samples[0].teacher_logprobs is not None


def test_scores_of_other_lengths_are_a_malformation() -> None:
    assert malformation(sample(1, teacher_logprobs=np.zeros(3, np.float32))) is None
    assert malformation(sample(1, teacher_logprobs=np.zeros(2, np.float32))) == "malformed response: teacher_logprobs has 2 of 3 tokens"
