"""Log functions of rollouts and evaluations: their metrics, what trackers receive, and their failures."""

from typing import Any

import numpy as np
import pytest

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.job.recorder import LogHooks
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.types import Sample, SampleGroup, SampleStatus


def rollout() -> Rollout:
    kept = SampleGroup(0, 0, [Sample(0, 0, "p", np.ones(2, np.int32), reward=1.0)])
    dropped = SampleGroup(1, 1, [Sample(1, 1, "p", np.ones(2, np.int32), reward=0.0)], kept=False)
    return Rollout(7, [kept, dropped], RolloutState({}), {"rollout/reward_mean": 1.0})


def hooks(**given: Any) -> LogHooks:
    return LogHooks(ArgsView(Config()), **given)


def test_a_function_adds_metrics_and_keeps_them_from_trackers() -> None:
    def log(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, float], rollout_time: float) -> bool:
        metrics["rollout/seen"] = len(samples)
        metrics["rollout/took"] = rollout_time
        return rollout_id == 7

    logged = hooks(of_rollout=log).rollout(rollout(), 2.5)
    assert logged.metrics == {"rollout/reward_mean": 1.0, "rollout/seen": 1, "rollout/took": 2.5}
    assert not logged.tracked
    assert hooks().rollout(rollout(), 2.5).tracked


@pytest.mark.parametrize("value", ["text", float("nan"), 10**400, None])
def test_a_function_that_fails_is_not_called_again(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def log(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], rollout_time: float) -> None:
        calls.append(rollout_id)
        metrics["rollout/x"] = value

    given = hooks(of_rollout=log)
    assert given.rollout(rollout(), 1).metrics == given.rollout(rollout(), 1).metrics == {"rollout/reward_mean": 1.0}
    assert calls == [7]
    (warning,) = caplog.messages
    assert warning.startswith("--custom-rollout-log-function-path raised ValueError: metrics has 'rollout/x'")


def test_an_evaluation_is_given_in_slimes_form() -> None:
    seen: dict[str, Any] = {}

    def log(rollout_id: int, args: Any, data: dict[str, Any], metrics: dict[str, float]) -> None:
        seen.update(data)
        metrics["eval/aime/best"] = max(data["aime"]["rewards"])

    samples = [Sample(i, 0, "p", np.ones(1, np.int32), reward=reward) for i, reward in enumerate([0.5, 0.25])]
    samples[1].status = SampleStatus.TRUNCATED
    logged = hooks(of_evaluation=log).evaluation(3, Evaluation({"eval/aime/mean@2": 0.375}, {"aime": [SampleGroup(0, 0, samples)]}))
    assert seen["aime"] == {"rewards": [0.5, 0.25], "truncated": [False, True], "samples": samples}
    assert logged.metrics == {"eval/aime/mean@2": 0.375, "eval/aime/best": 0.5}
    assert logged.tracked


def test_rewards_of_an_evaluation_are_the_values_that_each_dataset_reports() -> None:
    seen: dict[str, Any] = {}

    def log(rollout_id: int, args: Any, data: dict[str, Any], metrics: dict[str, float]) -> None:
        seen.update(data)

    sample = Sample(0, 0, "p", np.ones(1, np.int32), reward={"acc": 1.0, "brief": 0.25})
    groups = {name: [SampleGroup(0, 0, [sample])] for name in ("aime", "style")}
    hooks(of_evaluation=log).evaluation(3, Evaluation({}, groups, {"aime": "acc", "style": "brief"}))
    assert {name: data["rewards"] for name, data in seen.items()} == {"aime": [1.0], "style": [0.25]}
