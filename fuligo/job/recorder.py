"""Record of a run, step by step: metrics and the user's log functions, samples, trace, sinks, console."""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.hooks import Hook, describe_exception, hook_of
from fuligo.errors import FuligoError
from fuligo.observability.gpu_usage import GpuMonitor
from fuligo.observability.jsonl import Record
from fuligo.observability.progress import Progress
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.samples import Training
from fuligo.observability.sinks import Sink
from fuligo.observability.viewer.alarms import alarms
from fuligo.observability.viewer.metric_columns import MetricColumns
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.judging import failure_warning
from fuligo.rollout.metrics import metrics_problem
from fuligo.rollout.protocol import Rollout, UnfilledRolloutError
from fuligo.types import SampleStatus, StepResult, TrainBatch

TRAINER_PHASES = ("score", "train")
"""Phases in which the trainer computes."""


def step_record(
    step: int, policy_version: int, rollout: Mapping[str, float], result: StepResult | None, perf: Mapping[str, float]
) -> Record:
    """Return the line of `metrics.jsonl` for one step, after which the weights have `policy_version`."""
    train = result.metrics if result is not None else {}
    return {"step": step, "policy_version": policy_version, "time": time.time(), **_numbers(rollout), **_numbers(train), **_numbers(perf)}


def perf_metrics(durations: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Return the metrics `perf/*` of one step.

    Args:
        durations: seconds of each phase of the step, by name (`Trace.take_durations`).
        step_s: seconds from the end of the previous step to the end of this one. If rollouts run ahead of training, phases of
            other steps run at the same time, so the phases need not add up to it.
    """
    trained_s = sum(durations.get(phase, 0.0) for phase in TRAINER_PHASES)
    idle = max(0.0, 1.0 - trained_s / step_s) if step_s > 0 else 0.0
    return {"perf/step_s": step_s, **{f"perf/{phase}_s": seconds for phase, seconds in durations.items()}, "perf/idle_fraction": idle}


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert NumPy scalars to plain ones."""
    return {key: value if isinstance(value, int) else float(value) for key, value in metrics.items()}


_OPTIONS = {"of_rollout": "--custom-rollout-log-function-path", "of_evaluation": "--custom-eval-rollout-log-function-path"}


@dataclass(slots=True)
class Logged:
    """Metrics as a log function left them, and whether trackers receive them."""

    metrics: dict[str, float]
    tracked: bool = True


@dataclass(slots=True)
class LogHooks:
    """Log functions of a run. A function that raises is reported and not called again: logging must not end a run."""

    args: ArgsView | None = None
    """First argument of the functions; None if there are none."""
    of_rollout: Hook | None = None
    """--custom-rollout-log-function-path, if set."""
    of_evaluation: Hook | None = None
    """--custom-eval-rollout-log-function-path, if set."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Load the functions that the flags name. Raises HookError if one cannot be imported or does not fit."""
        of_rollout = hook_of(config, "custom_rollout_log_function_path")
        of_evaluation = hook_of(config, "custom_eval_rollout_log_function_path")
        return cls(ArgsView(config), of_rollout, of_evaluation)

    def rollout(self, rollout: Rollout, rollout_s: float) -> Logged:
        """Call the rollout log function with the kept samples and the duration of the rollout; it may add or change metrics."""
        samples = [sample for group in rollout.kept for sample in group.samples]
        metrics = dict(rollout.metrics)
        return self._logged("of_rollout", rollout.step, self.args, samples, metrics, rollout_s, metrics=metrics)

    def evaluation(self, num_rollouts: int, evaluation: Evaluation) -> Logged:
        """Call the evaluation log function with the rewards, truncation flags and samples of every dataset; it may add metrics."""
        metrics = dict(evaluation.metrics)
        return self._logged(
            "of_evaluation", num_rollouts, self.args, {} if self.of_evaluation is None else log_data(evaluation), metrics, metrics=metrics
        )

    def _logged(self, name: str, *arguments: Any, metrics: dict[str, Any]) -> Logged:
        """Call a log function, which may change `metrics` and returns True if trackers should skip them."""
        hook, given = getattr(self, name), dict(metrics)
        if hook is None:
            return Logged(given)
        try:
            skip = hook(*arguments)
            if (problem := metrics_problem(metrics)) is not None:
                raise ValueError(problem)
            return Logged(metrics, not skip)
        except Exception as error:
            logger.warning("%s raised %s; the run continues without it", _OPTIONS[name], describe_exception(error, hook))
            setattr(self, name, None)
            return Logged(given)


def log_data(evaluation: Evaluation) -> dict[str, dict[str, list[Any]]]:
    """Return rewards, truncation flags and samples by dataset; samples without a reward are left out.

    This is the argument of `--custom-eval-rollout-log-function-path`.
    """
    data: dict[str, dict[str, list[Any]]] = {}
    for name, groups in evaluation.groups.items():
        samples = [sample for group in groups for sample in group.samples if sample.reward is not None]
        data[name] = {
            "rewards": [sample.reward_value(evaluation.reward_keys.get(name)) for sample in samples],
            "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return data


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunRecorder:
    """Writer of every step to the run directory, the sinks and the console."""

    directory: RunDirectory
    progress: Progress
    sinks: list[Sink]
    log_hooks: LogHooks
    save_samples: bool
    reward_key: str | None
    pass_key: str | None
    gpus: GpuMonitor | None = None
    """Monitor of this machine's GPUs; None without one."""
    _first_evaluation: Record | None = field(init=False)
    _columns: MetricColumns = field(init=False)
    _last_step_end_s: float = field(default_factory=time.perf_counter)
    _reported_alarms: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._first_evaluation = next(iter(self.directory.evaluation_records()), None)
        self._columns = MetricColumns(self.directory.path / "metrics.jsonl")

    def phase(self, name: str, step: int) -> AbstractContextManager[None]:
        """Time a phase of the driver; it becomes `perf/<name>_s` of the step and an event of the trace."""
        return self.directory.trace.phase(name, step)

    def start(self, step: int) -> None:
        """Start the clock of the first step; time before it (loading, the first weight sync) is only in the trace."""
        self.directory.trace.take_durations(step)
        self._last_step_end_s = time.perf_counter()

    def record(self, rollout: Rollout, batch: TrainBatch | None, result: StepResult | None, version: int) -> None:
        """Write a completed step to disk, sinks and console, and log new alarms. Without training, `batch` and `result` are None."""
        step = rollout.step
        if warning := failure_warning(step, rollout.groups):
            logger.warning("%s", warning)
        with self.phase("record", step):
            if self.save_samples:
                training = None if batch is None or result is None else Training(batch.samples, result.scores)
                self.directory.write_samples(step, rollout.groups, training, reward_key=self.reward_key, pass_key=self.pass_key)
            self.directory.trace.samples(step, (sample for group in rollout.groups for sample in group.samples))
            if result is not None:
                self.directory.trace.ranks(step, result.rank_spans)
        now_s = time.perf_counter()
        perf = perf_metrics(self.directory.trace.take_durations(step), now_s - self._last_step_end_s)
        self._last_step_end_s = now_s
        if self.gpus is not None:
            perf |= self.gpus.take()
        logged = self.log_hooks.rollout(rollout, perf.get("perf/rollout_s", 0.0))
        record = step_record(step, version, logged.metrics, result, perf)
        self.directory.record(record)
        tracked = record if logged.tracked else {key: value for key, value in record.items() if not key.startswith("rollout/")}
        for sink in self.sinks:
            sink.write(tracked)
        self.progress.record(record)
        self._columns.update()
        for alarm in alarms(self._columns):
            if alarm.ongoing and alarm.severity != "note" and (alarm.key, alarm.first_step) not in self._reported_alarms:
                self._reported_alarms.add((alarm.key, alarm.first_step))
                logger.warning("alarm: %s (%s). %s", alarm.title, alarm.key, alarm.text)

    def record_unfilled(self, error: UnfilledRolloutError) -> None:
        """Write the samples of a rollout that was not filled, because they show the cause. A resumed run samples the step again.

        A failed write is only logged, because `error` ends the run.
        """
        if not self.save_samples:
            return
        try:
            self.directory.write_samples(error.step, error.groups, reward_key=self.reward_key, pass_key=self.pass_key)
        except FuligoError as failure:
            logger.warning("cannot write the samples of rollout %d, which was not filled: %s", error.step, failure)

    def record_evaluation(self, num_rollouts: int, evaluation: Evaluation) -> None:
        """Write an evaluation to disk, the sinks and the console.

        `num_rollouts`: complete rollouts, which the sinks get as the step; 0 is the untrained policy.
        """
        logged = self.log_hooks.evaluation(num_rollouts, evaluation)
        metrics = logged.metrics
        self.directory.write_evaluation(num_rollouts, evaluation.groups, metrics, reward_keys=evaluation.reward_keys)
        for sink in self.sinks if logged.tracked else ():
            sink.write({"step": num_rollouts, "time": time.time(), **metrics})
        self.progress.evaluation(num_rollouts, metrics, self._first_evaluation)
        self._first_evaluation = self._first_evaluation or metrics
