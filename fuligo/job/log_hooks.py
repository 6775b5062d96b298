"""Log functions of the user: --custom-rollout-log-function-path and --custom-eval-rollout-log-function-path."""

import logging
from dataclasses import dataclass
from typing import Any, Self

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.hooks import Hook, describe_exception, hook_of
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.protocol import Rollout
from fuligo.rollout.scores import is_finite
from fuligo.types import SampleStatus

logger = logging.getLogger(__name__)

_OPTIONS = {"of_rollout": "--custom-rollout-log-function-path", "of_evaluation": "--custom-eval-rollout-log-function-path"}


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
        """Call the function of rollouts with all trained samples and the seconds that the rollout took; it may add or change metrics."""
        samples = [sample for group in rollout.kept for sample in group.samples]
        metrics = dict(rollout.metrics)
        return self._logged("of_rollout", rollout.step, self.args, samples, metrics, rollout_s, metrics=metrics)

    def evaluation(self, num_rollouts: int, evaluation: Evaluation) -> Logged:
        """Call the function of evaluations with rewards, truncation and samples of every dataset; it may add metrics."""
        metrics = dict(evaluation.metrics)
        return self._logged(
            "of_evaluation", num_rollouts, self.args, {} if self.of_evaluation is None else log_data(evaluation), metrics, metrics=metrics
        )

    def _logged(self, name: str, *arguments: Any, metrics: dict[str, Any]) -> Logged:
        """Call a function, which may change `metrics` and returns whether trackers shall not receive them."""
        hook, given = getattr(self, name), dict(metrics)
        if hook is None:
            return Logged(given)
        try:
            skip = hook(*arguments)
            return Logged(_checked(metrics), not skip)
        except Exception as error:
            logger.warning("%s raised %s; the run continues without it", _OPTIONS[name], describe_exception(error, hook))
            setattr(self, name, None)
            return Logged(given)


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
