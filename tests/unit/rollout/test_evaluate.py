"""Evaluation: the estimators against brute force, and sampling that does not affect training."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from fuligo.config.groups import RewardFlags
from fuligo.engines.generation import SamplingParams
from fuligo.errors import RolloutError
from fuligo.rollout.evaluate import EvalSet, Evaluator, eval_metrics
from fuligo.rollout.generate import SingleTurn
from fuligo.rollout.metrics import sample_metrics
from fuligo.rollout.rewards import RewardRunner
from fuligo.types import Sample, SampleGroup, SampleStatus
from tests.unit.rollout.scripted import Rows, ScriptedEngine, ScriptedReward, Tokenizer, by_row, samples_of, world


def group(position: int, rewards: Sequence[float | None], length: int = 3) -> SampleGroup:
    """None is a failed sample; a length of 9 is truncated."""
    samples = []
    for offset, reward in enumerate(rewards):
        sample = Sample(position * len(rewards) + offset, position, "", np.zeros(2, np.int32), reward=reward)
        sample.response_ids = np.zeros(length, np.int32)
        sample.status = SampleStatus.FAILED if reward is None else SampleStatus.TRUNCATED if length == 9 else SampleStatus.COMPLETED
        sample.error = "engine gone" if reward is None else None
        samples.append(sample)
    return SampleGroup(position, position, samples)


def eval_set(name: str = "aime", *, num_prompts: int = 2, num_samples: int = 4, reward: ScriptedReward | None = None) -> EvalSet:
    return EvalSet(name, Rows().take(num_prompts), num_samples, SamplingParams(max_new_tokens=30), reward or ScriptedReward())


def test_metrics_are_means_over_prompts():
    metrics = eval_metrics("aime", 4, None, [group(0, [1, 0, 0, 0]), group(1, [1, 1, 0.5, 0], length=9)])
    assert metrics == pytest.approx(
        {
            "eval/aime/mean@4": (0.25 + 0.625) / 2,
            "eval/aime/pass@1": (0.25 + 0.5) / 2,
            "eval/aime/pass@2": (0.5 + 5 / 6) / 2,
            "eval/aime/pass@4": 1.0,
            "eval/aime/response_len_mean": 6.0,
            "eval/aime/truncated_ratio": 0.5,
            "eval/aime/num_failed": 0.0,
            "eval/aime/num_judge_timeouts": 0.0,
        }
    )


def test_failed_samples_are_left_out_and_counted():
    metrics = eval_metrics("aime", 2, None, [group(0, [1, None]), group(1, [0, 0]), group(2, [None, None])])
    assert metrics["eval/aime/mean@2"] == 0.5
    assert metrics["eval/aime/pass@1"] == 0.5
    assert metrics["eval/aime/pass@2"] == 0, "of the one prompt that has two samples"
    assert metrics["eval/aime/num_failed"] == 3


@pytest.mark.long
async def test_answers_that_hang_the_judge_count_as_wrong():
    """A right answer and one on which the comparison outlasts --rm-timeout-s give 1/2, not 1."""
    judged = group(0, [None] * 2)
    for sample, answer in zip(judged.samples, ["5", "9^{9^{9^{9}}}"], strict=True):
        sample.reward, sample.error, sample.status = None, None, SampleStatus.COMPLETED
        sample.versions = np.zeros(3, np.int32)
        sample.label, sample.response = "5", f"\\boxed{{{answer}}}"
    async with RewardRunner(RewardFlags(rm_type="math", rm_timeout_s=1.0)) as runner:
        await runner(judged)
    metrics = eval_metrics("aime", 2, None, [judged])
    assert metrics["eval/aime/mean@2"] == 0.5 and metrics["eval/aime/pass@2"] == 1.0
    assert (metrics["eval/aime/num_failed"], metrics["eval/aime/num_judge_timeouts"]) == (0, 1)
    assert "no verdict within 1 s (--rm-timeout-s)" in str(judged.samples[1].judge_error)
    assert sample_metrics([judged], reward_key=None, policy_version=0)["rollout/num_judge_timeouts"] == 1


def test_a_set_whose_samples_all_fail_is_an_error_with_their_reason():
    with pytest.raises(RolloutError, match="evaluation aime: no sample has a reward; the most frequent error: 2 x engine gone"):
        eval_metrics("aime", 2, None, [group(0, [None, None])])


def test_k_is_every_power_of_two_and_n():
    metrics = eval_metrics("aime", 6, None, [group(0, [1, 0, 0, 0, 0, 0])])
    assert [name for name in metrics if "pass@" in name] == [f"eval/aime/pass@{k}" for k in (1, 2, 4, 6)]


def evaluator(engine: ScriptedEngine, *sets: EvalSet, **options: object) -> Evaluator:
    given = {"seed": 1, "concurrency": 100, "timeout_s": 9.0, **options}
    return Evaluator(sets, SingleTurn(engine, Tokenizer(), timeout_s=9), engine, **given)


async def test_each_set_is_sampled_and_judged_in_its_own_way():
    engine = ScriptedEngine(by_row({0: 3}))
    easy = eval_set("easy", num_prompts=1, num_samples=2, reward=ScriptedReward(lambda row, index: 1.0))
    hard = EvalSet("hard", Rows().take(3), 1, SamplingParams(max_new_tokens=4, temperature=0.5), ScriptedReward(lambda row, index: row / 2))
    evaluation = await evaluator(engine, easy, hard).evaluate()
    assert evaluation.metrics["eval/easy/mean@2"] == 1
    assert evaluation.metrics["eval/hard/mean@1"] == 0.5
    assert evaluation.metrics["eval/hard/pass@1"] == pytest.approx(1 / 3)
    assert evaluation.metrics["eval/hard/truncated_ratio"] == pytest.approx(2 / 3)
    assert [group.row for group in evaluation.groups["hard"]] == [0, 1, 2]
    assert sorted(params.temperature for _, params in engine.requests) == [0.5, 0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("aligned", [False, True])
async def test_every_evaluation_draws_the_same_random_numbers(aligned: bool):
    engine = ScriptedEngine()
    given = evaluator(engine, eval_set("one"), eval_set("other"), aligned=aligned, concurrency=8)

    async def seeds() -> list[int]:
        engine.requests.clear()
        await given.evaluate()
        return sorted(params.sampling_seed or 0 for _, params in engine.requests)

    first = await seeds()
    assert first == await seeds()
    assert len(set(first)) == 16, "sets do not share random numbers, nor do they with training"


async def test_an_aligned_evaluation_goes_by_batches_that_may_be_in_flight_together():
    engine = ScriptedEngine()
    await evaluator(engine, eval_set(num_prompts=3, num_samples=2), aligned=True, concurrency=5).evaluate()
    held = ["pause", *["arrive"] * 4, "resume", *["start"] * 4]
    assert engine.log == [*held, "pause", *["arrive"] * 2, "resume", *["start"] * 2]


async def test_the_concurrency_limit_is_that_of_all_sets_together():
    engine = ScriptedEngine()
    await evaluator(engine, eval_set("one"), eval_set("other"), concurrency=3).evaluate()
    assert engine.most_running == 3


async def test_what_a_rollout_s_end_aborts_is_continued():
    engine = ScriptedEngine(by_row({}, default=25))
    running = asyncio.create_task(evaluator(engine, eval_set()).evaluate())
    await engine.until(lambda: engine.num_running == 8)
    await engine.abort_all()
    evaluation = await running
    assert all(sample.response_length == 25 for sample in samples_of(evaluation.groups["aime"]))
    assert evaluation.metrics["eval/aime/num_failed"] == 0


async def test_evaluation_touches_neither_the_order_nor_the_counters_of_training():
    training = world()
    await evaluator(training.engine, eval_set()).evaluate()
    rollout = await training.runner.rollout(0)
    assert [group.row for group in rollout.groups] == [0, 1]
    assert [sample.index for sample in samples_of(rollout.groups)] == [0, 1, 2, 3]
