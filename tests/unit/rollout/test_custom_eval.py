"""`--eval-function-path`: the user's function in place of the evaluator."""

from copy import deepcopy
from types import SimpleNamespace

import pytest

from fuligo.errors import RolloutError
from fuligo.rollout.custom_generate import continue_sample
from fuligo.rollout.custom_rollout import CustomEvaluator
from fuligo.rollout.evaluate import EvalSet
from fuligo.rollout.generate import SingleTurn, sampling_params
from tests.unit.rollout.scripted import Rows, ScriptedReward, Tokenizer, world


def custom(hook, *, own_key: str | None = None, reward_key: str | None = None) -> CustomEvaluator:
    given = world()
    params = sampling_params(given.flags)
    sets = [EvalSet("aime", Rows().take(2), 3, params, ScriptedReward(), own_key)]
    generate = SingleTurn(given.engine, Tokenizer(), timeout_s=9)
    return CustomEvaluator(
        hook, SimpleNamespace(), sets, generate, params, policy_version=lambda: 0, reward_key=reward_key, vocab_size=None
    )


async def own(args, rollout_id, data_source, evaluation=False):
    """Answer every prompt of every dataset; the first response to each is right."""
    assert evaluation
    result = {}
    for name in data_source.names:
        result[name] = [sample for group in data_source.get_samples(name) for sample in group]
        for sample in result[name]:
            await continue_sample(sample, {})
            sample.reward = float(sample.index % 3 == 0)
    return result


async def test_metrics_are_those_of_the_samples_that_it_returns():
    evaluator = custom(own)
    first, second = await evaluator.evaluate(0), await evaluator.evaluate(5)
    assert first.metrics["eval/aime/mean@3"] == pytest.approx(1 / 3)
    assert first.metrics["eval/aime/pass@1"] == pytest.approx(1 / 3)
    assert first.metrics["eval/aime/pass@3"] == 1
    assert [len(group.samples) for group in first.groups["aime"]] == [3, 3]
    assert second.metrics == first.metrics, "each evaluation begins with fresh samples"


async def test_each_dataset_reports_its_own_value_of_dict_rewards():
    async def graded(args, rollout_id, data_source, evaluation=False):
        result = await own(args, rollout_id, data_source, evaluation)
        for sample in result["aime"]:
            sample.reward = {"acc": sample.reward, "score": 0.5}
        return result | {"extra": deepcopy(result["aime"])}

    evaluation = await custom(graded, own_key="acc", reward_key="score").evaluate(0)
    assert evaluation.reward_keys == {"aime": "acc", "extra": "score"}
    assert evaluation.metrics["eval/aime/mean@3"] == pytest.approx(1 / 3)
    assert evaluation.metrics["eval/extra/mean@3"] == 0.5


async def test_samples_without_reward_count_as_failed():
    async def unjudged(args, rollout_id, data_source, evaluation=False):
        result = await own(args, rollout_id, data_source, evaluation)
        result["aime"][0].reward = None
        return result

    assert (await custom(unjudged).evaluate(0)).metrics["eval/aime/num_failed"] == 1


@pytest.mark.parametrize("result", [None, {}, {"aime": []}, {"aime": [1]}, {"a/b": ["x"]}])
async def test_what_it_returns_is_checked(result):
    with pytest.raises(RolloutError, match=r"--eval-function-path must return"):
        await custom(lambda *_, evaluation: result).evaluate(0)


async def test_an_exception_names_flag_and_line():
    def broken(args, rollout_id, data_source, evaluation=False):
        raise KeyError("judge")

    with pytest.raises(RolloutError, match=r"--eval-function-path: the function raised after 4 rollouts: KeyError: .*test_custom_eval"):
        await custom(broken).evaluate(4)
