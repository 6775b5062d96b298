"""Misbehaving engines, rewards and hooks: a bad sample is data, and a run that cannot continue ends with a clear error."""

import asyncio

import numpy as np
import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.errors import EngineError, RolloutError
from fuligo.rollout import group_tasks
from fuligo.rollout.judging import MIN_EVIDENCE, FailureWatch, failure_warning
from fuligo.types import Sample, SampleGroup, SampleStatus
from tests.unit.rollout.scripted import ScriptedEngine, ScriptedReward, by_row, samples_of, world


async def test_a_failed_sample_stays_in_its_group_with_the_reason():
    given = world(engine=ScriptedEngine(refuse=lambda index: index == 1), n_samples_per_prompt=3)
    rollout = await given.runner.rollout(0)
    failed = rollout.kept[0].samples[1]
    assert failed.status is SampleStatus.FAILED
    assert failed.error == "engine: request 1-1 refused"
    assert rollout.metrics["rollout/num_failed"] == 1
    said = failure_warning(0, rollout.groups)
    assert said == "rollout 0: 1 of 6 samples failed and will not be trained on; most frequent errors: 1 x engine: request 1-1 refused"
    assert failure_warning(0, rollout.groups[1:]) is None


async def test_a_group_with_fewer_than_two_usable_samples_is_dropped():
    given = world(engine=ScriptedEngine(refuse=lambda index: index == 1))
    rollout = await given.runner.rollout(0)
    assert rollout.groups[0].drop_reason == "too_few_usable_samples"
    assert rollout.metrics["rollout/dropped/too_few_usable_samples"] == 1
    assert [group.row for group in rollout.kept] == [1, 2]


async def test_one_sample_a_prompt_is_enough_where_one_was_asked_for():
    given = world(n_samples_per_prompt=1, engine=ScriptedEngine(refuse=lambda index: index == 0))
    assert [group.row for group in (await given.runner.rollout(0)).kept] == [1, 2]


def failed_group(index: int, error: str = "engine: refused") -> SampleGroup:
    return SampleGroup(index, index, [Sample(index, index, "p", np.ones(9, np.int32), status=SampleStatus.FAILED, error=error)])


async def test_an_engine_that_fails_everything_ends_the_rollout_with_its_error():
    given = world(engine=ScriptedEngine(refuse=lambda index: True))
    words = "rollout 0: 32 of the last 32 groups have too few usable samples; most frequent errors: 1 x engine: request 0-0 refused"
    with pytest.raises(RolloutError, match=words):
        await given.runner.rollout(0)


async def test_few_sampling_waves_end_a_failing_rollout_with_the_error_too():
    given = world(engine=ScriptedEngine(refuse=lambda index: True), max_sampling_waves=3)
    with pytest.raises(RolloutError, match=r"rollout 0: 5 of the last 5 groups .*refused"):
        await given.runner.rollout(0)


async def test_used_up_waves_name_errors_beside_equal_rewards():
    engine = ScriptedEngine(refuse=lambda index: index % 3 == 0)
    given = world(engine=engine, reward=ScriptedReward(lambda row, index: 0.0), group_filter=lambda samples: "dull", max_sampling_waves=3)
    with pytest.raises(
        RolloutError, match=r"^cannot fill the rollout: 3 sampling waves .*with every reward 0\. Most frequent errors: 1 x .*refused.*\.$"
    ):
        await given.runner.rollout(0)


async def test_an_engine_that_breaks_in_the_middle_of_a_run_ends_it():
    given = world(engine=ScriptedEngine(refuse=lambda index: index >= 100))
    with pytest.raises(RolloutError, match=r"rollout 25: 31 of the last 32 groups"):
        for step in range(100):
            await given.runner.rollout(step)


async def test_failures_among_many_dropped_groups_do_not_end_the_rollout():
    given = world(engine=ScriptedEngine(refuse=lambda index: index % 10 == 0), group_filter=lambda samples: "dull")
    with pytest.raises(RolloutError, match=r"33 sampling waves .* dropped: \d+ by dull, \d+ by too_few_usable_samples"):
        await given.runner.rollout(0)


@pytest.mark.parametrize(("num_failed", "ends"), [(31, True), (30, False)])
def test_a_run_ends_once_nearly_all_of_the_last_groups_failed(num_failed: int, ends: bool):
    watch = FailureWatch(batch_size=8)
    reasons = [None] * 100 + ["dull"] * (MIN_EVIDENCE - num_failed) + ["too_few_usable_samples"] * num_failed
    groups = [failed_group(index) for index in range(len(reasons))]
    for group, reason in zip(groups[:-1], reasons[:-1], strict=True):
        watch.add(5, group, reason)
    if not ends:
        watch.add(5, groups[-1], reasons[-1])
        return
    with pytest.raises(RolloutError, match=r"^rollout 5: 31 of the last 32 groups .* most frequent errors: 31 x engine: refused$"):
        watch.add(5, groups[-1], reasons[-1])


def test_a_large_batch_needs_as_many_failures():
    watch = FailureWatch(batch_size=128)
    for index in range(127):
        watch.add(0, failed_group(index), "too_few_usable_samples")
    with pytest.raises(RolloutError, match="128 of the last 128 groups"):
        watch.add(0, failed_group(127), "too_few_usable_samples")


def test_prompts_that_fill_the_context_end_the_rollout_with_the_flag():
    watch = FailureWatch(batch_size=8)
    samples = [Sample(index, index, "p", np.ones(9, np.int32), status=SampleStatus.TRUNCATED, reward=0.0) for index in range(8)]
    for sample in samples:
        watch.add(0, SampleGroup(sample.index, sample.index, [sample]), "too_few_usable_samples")
    with pytest.raises(RolloutError, match="most frequent errors: 8 x the prompt fills --rollout-max-context-len"):
        watch.refuse_mass_failure(0)


@pytest.mark.long
async def test_a_request_that_hangs_fails_at_its_deadline():
    given = world(engine=ScriptedEngine(hang=lambda index: index == 0), n_samples_per_prompt=3, timeout_s=2.0)
    rollout = await given.runner.rollout(0)
    assert rollout.kept[0].samples[0].error == "no response within 2 s (--rollout-timeout-s)"


async def test_a_request_that_ignores_the_abort_is_cancelled_and_its_prompt_returns(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(group_tasks, "ABORT_DEADLINE_S", 0.05)
    given = world(engine=ScriptedEngine(hang=lambda index: index == 2), over_sampling_batch_size=3)
    rollout = await given.runner.rollout(0)
    assert [group.row for group in rollout.kept] == [0, 2]
    assert given.rows.returned == [1]
    assert "did not return within 0.05 s" in caplog.text


async def test_a_request_on_its_way_at_the_first_abort_is_caught_by_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_tasks, "ABORT_AGAIN_S", 0.01)
    given = world(engine=ScriptedEngine(by_row({1: 10_000})), over_sampling_batch_size=3, rollout_max_response_len=10_000)
    abort_all, calls = given.engine.abort_all, 0

    async def deaf_at_first() -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            await abort_all()

    given.engine.abort_all = deaf_at_first
    rollout = await given.runner.rollout(0)
    assert calls >= 2
    assert [group.drop_reason for group in rollout.groups] == [None, "aborted", None]


async def test_an_engine_that_cannot_abort_ends_the_rollout_and_leaves_nothing_running():
    given = world(engine=ScriptedEngine(by_row({1: 10_000})), over_sampling_batch_size=3)

    async def refuse() -> None:
        raise EngineError("engine: no answer to abort")

    given.engine.abort_all = refuse
    with pytest.raises(EngineError, match="no answer to abort"):
        await given.runner.rollout(0)
    assert given.engine.num_running == 0


async def test_cancelling_a_rollout_leaves_nothing_running():
    given = world(engine=ScriptedEngine(hang=lambda index: True))
    task = asyncio.create_task(given.runner.rollout(0))
    await given.engine.until(lambda: len(given.engine.requests) == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [other for other in asyncio.all_tasks() if other is not asyncio.current_task()] == []


async def test_cancelling_an_aligned_start_resumes_the_engine():
    given = world(engine=ScriptedEngine(), aligned_waves=True)

    async def none_arrived():
        return type(await ScriptedEngine().load())(0, 0, 0)

    given.engine.load = none_arrived
    task = asyncio.create_task(given.runner.rollout(0))
    await given.engine.until(lambda: "pause" in given.engine.log)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert given.engine.log[-1] == "resume"


async def returns_garbage(sample: Sample, params: SamplingParams) -> Sample:
    sample.response_ids = np.arange(3, dtype=np.int32)
    sample.status = SampleStatus.COMPLETED
    return sample


async def returns_nan(sample: Sample, params: SamplingParams) -> Sample:
    sample.response_ids, sample.versions = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
    sample.loss_mask, sample.engine_logprobs = np.ones(2, np.int8), np.array([-1, np.nan], np.float32)
    sample.status = SampleStatus.COMPLETED
    return sample


async def returns_nothing(sample: Sample, params: SamplingParams) -> list[Sample]:
    return []


async def returns_it_pending(sample: Sample, params: SamplingParams) -> Sample:
    return sample


async def raises(sample: Sample, params: SamplingParams) -> Sample:
    raise KeyError("tool")


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        (returns_garbage, "lengths differ: response_ids 3, loss_mask 0, engine_logprobs 0, versions 0"),
        (returns_nan, "a log-probability is not finite"),
        (returns_nothing, "returned an empty list"),
        (returns_it_pending, "a pending sample"),
        (raises, "generation raised KeyError: 'tool'"),
    ],
)
async def test_whatever_a_generate_function_does_is_the_sample_s_failure(generate, reason: str):
    given = world(generate=generate)
    with pytest.raises(RolloutError) as caught:
        await given.runner.rollout(0)
    assert reason in str(caught.value)


async def test_a_reward_that_raises_fails_the_group_s_samples():
    class Raises(ScriptedReward):
        async def __call__(self, group: SampleGroup) -> None:
            if group.row == 0:
                raise ZeroDivisionError("in the reward")
            await super().__call__(group)

    rollout = await world(reward=Raises()).runner.rollout(0)
    assert [sample.error for sample in rollout.groups[0].samples] == ["the reward raised ZeroDivisionError: in the reward"] * 2
    assert [group.row for group in rollout.kept] == [1, 2]


async def test_a_sample_without_a_reward_is_not_usable():
    class Forgets(ScriptedReward):
        async def __call__(self, group: SampleGroup) -> None:
            if group.row != 1:
                await super().__call__(group)

    rollout = await world(reward=Forgets()).runner.rollout(0)
    assert [group.drop_reason for group in rollout.groups[:2]] == [None, "too_few_usable_samples"]


async def test_a_sample_without_a_token_is_not_usable():
    async def full_context(sample: Sample, params: SamplingParams) -> Sample:
        if sample.metadata["row"] != 1:
            sample.response_ids, sample.versions = np.ones(1, np.int32), np.zeros(1, np.int32)
            sample.loss_mask, sample.engine_logprobs = np.ones(1, np.int8), np.zeros(1, np.float32)
        sample.status = SampleStatus.TRUNCATED
        return sample

    rollout = await world(generate=full_context).runner.rollout(0)
    assert [group.drop_reason for group in rollout.groups[:2]] == [None, "too_few_usable_samples"]


async def test_an_exhausted_data_source_is_an_error():
    given = world()
    given.rows.take = lambda num_prompts, /: []
    with pytest.raises(RolloutError, match="no prompts left"):
        await given.runner.rollout(3)


async def test_samples_split_from_one_rollout_count_as_one():
    async def split(sample: Sample, params: SamplingParams) -> list[Sample]:
        parts = []
        for _ in range(2):
            part = Sample(sample.index, sample.group_index, sample.prompt, sample.prompt_ids, metadata=sample.metadata)
            part.response_ids, part.versions = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
            part.loss_mask, part.engine_logprobs = np.ones(2, np.int8), np.zeros(2, np.float32)
            part.status = SampleStatus.FAILED if sample.index == 0 else SampleStatus.COMPLETED
            parts.append(part)
        return parts

    rollout = await world(generate=split).runner.rollout(0)
    assert rollout.groups[0].drop_reason == "too_few_usable_samples", "two parts of one rollout are no group"
    assert [sample.index for sample in samples_of(rollout.kept[:1])] == [2, 2, 3, 3]
