"""Log functions of the user: --custom-rollout-log-function-path and --custom-eval-rollout-log-function-path."""

import logging
from dataclasses import dataclass
from typing import Any, Self

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.flags import flags
from fuligo.config.hooks import Hook, describe_exception, hook_of
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.protocol import Rollout
from fuligo.rollout.scores import is_finite
from fuligo.types import SampleStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Logged:
    """Metrics after a log function, and whether trackers receive them."""

    metrics: dict[str, float]
    tracked: bool = True


@dataclass(slots=True)
class LogHooks:
    """Log functions of a run. One that raises is not called again, with a warning: logging must not end a run."""

    args: ArgsView | None = None
    of_rollout: Hook | None = None
    of_evaluation: Hook | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """Load the functions that the flags name. Raises HookError if one cannot be imported or does not fit."""
        of_rollout = hook_of(config, "custom_rollout_log_function_path")
        of_evaluation = hook_of(config, "custom_eval_rollout_log_function_path")
        return cls(ArgsView(config), of_rollout, of_evaluation)

    def rollout(self, rollout: Rollout, rollout_s: float) -> Logged:
        """Call the function of rollouts with all trained samples; it may add metrics, or change them.

        Args:
            rollout_s: seconds that the rollout took.
        """
        if self.of_rollout is None:
            return Logged(rollout.metrics)
        samples = [sample for group in rollout.kept for sample in group.samples]
        metrics = dict(rollout.metrics)
        try:
            skip = self.of_rollout(rollout.step, self.args, samples, metrics, rollout_s)
            return Logged(_checked(metrics), not skip)
        except Exception as error:
            _warn("custom_rollout_log_function_path", self.of_rollout, error)
            self.of_rollout = None
            return Logged(rollout.metrics)

    def evaluation(self, num_rollouts: int, evaluation: Evaluation) -> Logged:
        """Call the function of evaluations with rewards, truncation and samples of every dataset; it may add metrics."""
        if self.of_evaluation is None:
            return Logged(dict(evaluation.metrics))
        metrics = dict(evaluation.metrics)
        try:
            skip = self.of_evaluation(num_rollouts, self.args, log_data(evaluation), metrics)
            return Logged(_checked(metrics), not skip)
        except Exception as error:
            _warn("custom_eval_rollout_log_function_path", self.of_evaluation, error)
            self.of_evaluation = None
            return Logged(dict(evaluation.metrics))


def log_data(evaluation: Evaluation) -> dict[str, dict[str, list[Any]]]:
    """Return rewards, truncation and samples of every dataset, as the log function of evaluations gets them."""
    data: dict[str, dict[str, list[Any]]] = {}
    for name, groups in evaluation.groups.items():
        samples = [sample for group in groups for sample in group.samples if sample.reward is not None]
        data[name] = {
            "rewards": [sample.reward_value(evaluation.reward_keys.get(name)) for sample in samples],
            "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return data


def _checked(metrics: dict[str, Any]) -> dict[str, float]:
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_finite(value):
            raise ValueError(f"metrics has {name!r}: {value!r:.80}; names are strings and values finite numbers")
    return metrics


def _warn(flag_name: str, hook: Hook, error: Exception) -> None:
    cause = describe_exception(error, hook)
    logger.warning("%s raised %s; the run continues without it", flags()[flag_name].option, cause)
