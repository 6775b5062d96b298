"""Custom rewards: any misbehavior fails its samples with the reason, and nothing else."""

import asyncio
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fuligo.config.groups import RewardFlags
from fuligo.rollout.rewards import CustomReward, ExtraReward, RewardRunner
from fuligo.types import SampleGroup, SampleStatus

MakeGroup = Callable[..., SampleGroup]
ARGS = object()


async def judge(function: Callable[..., Any], group: SampleGroup, *, timeout_s: float = 20.0, **settings: Any) -> RewardRunner:
    async with RewardRunner(RewardFlags(rm_timeout_s=timeout_s, **settings), CustomReward(function, ARGS, timeout_s)) as runner:
        await runner(group)
    return runner


async def length_async(args: Any, sample: Any) -> float:
    assert args is ARGS
    return len(sample.response)


def length_sync(args: Any, sample: Any) -> float:
    assert threading.current_thread() is not threading.main_thread()
    return len(sample.response)


def length_wrapped(args: Any, sample: Any) -> Any:
    return length_async(args, sample)


class Length:
    async def __call__(self, args: Any, sample: Any) -> float:
        return len(sample.response)


@pytest.mark.parametrize("function", [length_async, length_sync, length_wrapped, Length()])
async def test_functions_of_every_kind_are_called(make_group: MakeGroup, function: Callable[..., Any]) -> None:
    group = make_group("a", "bbb")
    await judge(function, group)
    assert [sample.reward for sample in group.samples] == [1.0, 3.0]
    assert all(sample.status is SampleStatus.COMPLETED and len(sample.spans) == 1 for sample in group.samples)


async def raises(args: Any, sample: Any) -> float:
    raise ValueError("no such rubric")


def raises_sync(args: Any, sample: Any) -> float:
    raise StopIteration("no such rubric")


async def exits(args: Any, sample: Any) -> float:
    sys.exit("no such rubric")


async def cancels_itself(args: Any, sample: Any) -> float:
    raise asyncio.CancelledError


async def hangs(args: Any, sample: Any) -> float:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            sample.metadata["cancelled"] = sample.metadata.get("cancelled", 0) + 1
            if sample.metadata["cancelled"] > 1:  # swallows the deadline's, not that of the closing loop
                raise


RELEASE = threading.Event()


def hangs_sync(args: Any, sample: Any) -> float:
    RELEASE.wait()
    return 1.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, "raises raised ValueError: no such rubric (test_custom.py:"),
        (raises_sync, "no such rubric"),
        (exits, "exits raised SystemExit: no such rubric"),
        (cancels_itself, "cancels_itself canceled itself"),
        (hangs, "hangs gave no reward within 0.2 s"),
        (hangs_sync, "hangs_sync gave no reward within 0.2 s"),
        (lambda args, sample, extra: 1.0, "TypeError"),
    ],
)
async def test_a_reward_that_raises_or_hangs_fails_the_sample(make_group: MakeGroup, function: Callable[..., Any], text: str) -> None:
    group = make_group("a", "b")
    RELEASE.clear()
    try:
        await judge(function, group, timeout_s=0.2 if "0.2 s" in text else 60.0)
    finally:
        RELEASE.set()
    for sample in group.samples:
        assert sample.status is SampleStatus.FAILED
        assert sample.reward is None
        assert str(sample.error).startswith("reward: ") and text in str(sample.error)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1.0], {"score": 1.0}, np.array([1.0, 2.0]), 10**400, 1j, {}])
async def test_a_reward_that_is_not_a_finite_number_fails_the_sample(make_group: MakeGroup, value: Any) -> None:
    async def function(args: Any, sample: Any) -> Any:
        return value

    group = make_group("a")
    await judge(function, group)
    assert group.samples[0].status is SampleStatus.FAILED
    assert "the reward" in str(group.samples[0].error)


@pytest.mark.parametrize(("value", "reward"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2.0), 2.0), (np.int64(3), 3.0)])
async def test_every_kind_of_number_is_accepted(make_group: MakeGroup, value: Any, reward: float) -> None:
    group = make_group("a")
    await judge(lambda args, sample: value, group)
    assert group.samples[0].reward == reward and type(group.samples[0].reward) is float


async def test_a_part_of_a_dict_that_no_float_can_hold_fails_the_sample(make_group: MakeGroup) -> None:
    """A reward service may answer with any JSON, and metrics average every number of it."""
    group = make_group("a")
    await judge(lambda args, sample: {"score": 1.0, "detail": 10**400}, group, reward_key="score")
    assert group.samples[0].status is SampleStatus.FAILED
    assert "the reward's 'detail' is an integer too large for a float" in str(group.samples[0].error)


async def test_a_dict_must_have_the_reward_key(make_group: MakeGroup) -> None:
    async def function(args: Any, sample: Any) -> dict[str, Any]:
        return {"score": 1 if sample.index == 0 else math.nan, "note": "kept"}

    group = make_group("a", "b")
    await judge(function, group, reward_key="score")
    assert group.samples[0].reward == {"score": 1.0, "note": "kept"}
    assert "the reward's 'score' must be a finite number, not nan" in str(group.samples[1].error)

    group = make_group("a")
    await judge(function, group, reward_key="acc")
    assert "a dict with the keys score, note; --reward-key (acc)" in str(group.samples[0].error)

    group = make_group("a")
    await judge(function, group, custom_reward_post_process_path="module.function")
    assert group.samples[0].reward == {"score": 1, "note": "kept"}


async def test_a_group_reward_sees_the_whole_group_at_once(make_group: MakeGroup) -> None:
    async def rank(args: Any, samples: list[Any]) -> list[float]:
        order = sorted(len(sample.response) for sample in samples)
        return [order.index(len(sample.response)) for sample in samples]

    group = make_group("ccc", "a", "bb", "failed")
    group.samples[3].status = SampleStatus.FAILED
    await judge(rank, group, group_rm=True)
    assert [sample.reward for sample in group.samples] == [2.0, 0.0, 1.0, None]
    assert [len(sample.spans) for sample in group.samples] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("returned", "failed"), [([1.0], "all"), (1.0, "all"), (None, "all"), ([1.0, math.nan], "second"), (RuntimeError("no"), "all")]
)
async def test_a_group_reward_of_the_wrong_shape_fails_the_group(make_group: MakeGroup, returned: Any, failed: str) -> None:
    def function(args: Any, samples: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    group = make_group("a", "b")
    await judge(function, group, group_rm=True)
    assert [sample.status is SampleStatus.FAILED for sample in group.samples] == [failed == "all", True]


async def test_samples_that_need_no_judging_are_kept(make_group: MakeGroup) -> None:
    """Samples with a reward of a custom generation function, failed samples and unfinished samples are not judged."""
    group = make_group("given", "failed", "aborted", "bad")
    group.samples[0].reward = 7
    group.samples[1].status = SampleStatus.FAILED
    group.samples[2].status = SampleStatus.ABORTED
    group.samples[3].reward = math.inf
    await judge(length_async, group)
    assert [sample.reward for sample in group.samples] == [7.0, None, None, None]
    assert [str(sample.status) for sample in group.samples] == ["completed", "failed", "aborted", "failed"]


async def test_no_reward_is_needed_with_a_teacher(make_group: MakeGroup) -> None:
    """Samples that already have a reward keep it."""
    async with RewardRunner(RewardFlags(), optional=True) as runner:
        group = make_group("a", "b")
        group.samples[1].reward = 0.5
        await runner(group)
    assert [sample.reward for sample in group.samples] == [0.0, 0.5]


async def test_a_sample_without_a_reward_type_fails(make_group: MakeGroup) -> None:
    async with RewardRunner(RewardFlags()) as runner:
        group, unknown = make_group("a"), make_group("a", rm_type="maths")
        await runner(group)
        await runner(unknown)
    assert "no reward is configured for the sample" in str(group.samples[0].error)
    assert "did you mean math" in str(unknown.samples[0].error)
    assert group.samples[0].status is unknown.samples[0].status is SampleStatus.FAILED


async def test_cancelling_the_run_cancels_a_running_reward(make_group: MakeGroup) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(args: Any, sample: Any) -> float:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return 1.0

    judging = asyncio.create_task(judge(slow, make_group("a"), timeout_s=60.0))
    await started.wait()
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    await asyncio.wait_for(cancelled.wait(), 120)


async def judge_with_extra(main: Callable[..., Any], group: SampleGroup, extra: Callable[..., Any], **settings: Any) -> None:
    parts = [ExtraReward("brief", CustomReward(extra, ARGS, 20.0), -0.5)]
    async with RewardRunner(RewardFlags(rm_timeout_s=20.0, **settings), CustomReward(main, ARGS, 20.0), parts) as runner:
        await runner(group)


async def test_further_rewards_are_added_with_their_weights(make_group: MakeGroup) -> None:
    group = make_group("a", "bbb")
    await judge_with_extra(lambda args, sample: 10.0, group, length_async)
    assert [sample.reward for sample in group.samples] == [9.5, 8.5]
    assert [sample.metrics for sample in group.samples] == [
        {"reward_main": 10.0, "reward_brief": 1.0},
        {"reward_main": 10.0, "reward_brief": 3.0},
    ]


async def test_further_rewards_are_added_to_the_named_value_of_a_dict(make_group: MakeGroup) -> None:
    group = make_group("bbb")
    await judge_with_extra(lambda args, sample: {"score": 2.0, "note": "x"}, group, length_async, reward_key="score")
    assert group.samples[0].reward == {"score": 0.5, "note": "x"}


async def test_a_further_reward_that_raises_fails_its_sample(make_group: MakeGroup) -> None:
    group = make_group("bbb")
    await judge_with_extra(lambda args, sample: 1.0, group, raises)
    assert group.samples[0].status is SampleStatus.FAILED
    assert "no such rubric" in (group.samples[0].error or "")
