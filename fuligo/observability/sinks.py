"""Sinks that also receive the metrics of steps and evaluations: TensorBoard, W&B, Trackio, MLflow, and a user's class."""

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.hooks import Hook, describe_exception, hook_of
from fuligo.config.secret import hide_credentials
from fuligo.errors import ConfigError, HookError
from fuligo.formats.disk import writing
from fuligo.observability.jsonl import Record

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receiver of records: `step`, `time` (seconds since 1970) and metrics."""

    def write(self, record: Record) -> None:
        """Receive the metrics of a step, or an evaluation (`eval/*`) of the weights that sample this step."""

    def close(self) -> None: ...


def open_sinks(config: Config, run_dir: Path, *, start: int, kept: Sequence[Record] = ()) -> list[Sink]:
    """Open the sinks that the flags select, for a run that starts or resumes at the step `start`.

    `kept` are evaluations of the weights at `start`, which a resume does not repeat: `num_rollouts` and `eval/*`. Raises ConfigError if a
    package is not installed, or a sink cannot be opened, such as W&B without a login or a user's class that raises.
    """
    flags = config.observability
    missing = [
        f"--use-{package} needs the package {package}, which is not installed; pip install 'fuligo[{package}]'"
        for package in ("tensorboard", "wandb", "trackio", "mlflow")
        if getattr(flags, f"use_{package}") and importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError(*missing)
    sinks: list[Sink] = []
    if flags.use_tensorboard:
        tensorboard = TensorBoardSink(run_dir / "tensorboard", start=start)
        for evaluation in kept:  # TensorBoard discards them with step `start`
            metrics = {key: value for key, value in evaluation.items() if key != "num_rollouts"}
            tensorboard.write({"step": start, "time": time.time(), **metrics})
        sinks.append(tensorboard)
    if flags.use_wandb:
        sinks.append(WandbSink(config, run_dir))
    if flags.use_trackio:
        sinks.append(GuardedSink("--use-trackio", TrackioSink, config, run_dir))
    if flags.use_mlflow:
        sinks.append(GuardedSink("--use-mlflow", MlflowSink, config, run_dir))
    if (hook := hook_of(config, "sink_path")) is not None:
        sinks.append(GuardedSink(f"--sink-path {flags.sink_path}", hook, ArgsView(config), run_dir))
    return sinks


class TensorBoardSink:
    """TensorBoard event files. TensorBoard discards what an earlier process wrote from step `start` on."""

    def __init__(self, directory: Path, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=start)
        self._directory = directory

    def write(self, record: Record) -> None:
        """Write and flush a record. Raises FuligoError if an event file cannot be written."""
        with writing(self._directory):
            for key, value in record.items():
                if key not in ("step", "time"):
                    self._writer.add_scalar(key, value, record["step"], walltime=record["time"])
            self._writer.flush()

    def close(self) -> None:
        """Close the event file. `write` has flushed everything or reported why it could not."""
        with suppress(OSError):
            self._writer.close()


class WandbSink:
    """W&B run, continued when the run resumes. `step` is an ordinary metric, because W&B's own step cannot go back on resume."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        wandb = importlib.import_module("wandb")
        flags = config.observability
        # slime's launch scripts set WANDB_KEY; W&B itself reads WANDB_API_KEY.
        key = os.environ.get("WANDB_KEY")
        if key and not os.environ.get("WANDB_API_KEY"):
            os.environ["WANDB_API_KEY"] = key
            logger.info("took W&B's key from WANDB_KEY, since WANDB_API_KEY is not set")
        try:
            file = run_dir / "wandb" / "run-id.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text(uuid4().hex[:8])
            self._run = wandb.init(
                dir=run_dir,
                id=file.read_text(),
                name=run_dir.name,
                project=flags.wandb_project,
                group=flags.wandb_group,
                mode=flags.wandb_mode,
                resume="allow",
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(x_disable_meta=True),  # the metadata hold the command line, which may hold keys
            )
        except wandb.Error as error:
            raise ConfigError(f"cannot start wandb: {error}; run `wandb login`, or use --wandb-mode offline") from None
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log(record)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """Trackio run, continued when the run resumes."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=config.observability.tracking_project,
            name=run_dir.name,
            config=config.model_dump(mode="json"),
            resume="allow",
            private=True,  # applies to a Space that it creates for TRACKIO_SPACE_ID
            embed=False,
        )

    def write(self, record: Record) -> None:
        metrics = {key: value for key, value in record.items() if key not in ("step", "time")}
        self._run.log(metrics, step=int(record["step"]))

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow run, continued when the run resumes. Its parameters are the flags that differ from their defaults."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        file = run_dir / "mlflow-run-id.txt"
        if file.exists():
            self._run_id = file.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        name = config.observability.tracking_project
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=run_dir.name).info.run_id
        file.write_text(self._run_id)
        given, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
        changed = {name: value for group in given for name, value in given[group].items() if value != defaults[group].get(name)}
        params = [mlflow.entities.Param(name, str(value)[:500]) for name, value in changed.items()]
        for first in range(0, len(params), 100):  # MLflow's limit per call
            self._client.log_batch(self._run_id, params=params[first : first + 100])

    def write(self, record: Record) -> None:
        moment_ms, step = int(record["time"] * 1000), int(record["step"])
        self._client.log_batch(
            self._run_id,
            metrics=[
                self._entities.Metric(key.replace("@", "_at_"), float(value), moment_ms, step)
                for key, value in record.items()
                if key not in ("step", "time")
            ],
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class GuardedSink:
    """Wrapper of a sink that depends on a server or on the user's code, so that its failure does not end the run.

    After an exception in `write`, the sink receives no more records. Raises HookError if its constructor, `make(*given)`, raises.
    """

    def __init__(self, name: str, make: Hook, *given: Any) -> None:
        self._hook = make
        self._name = name
        self._failed = False
        try:
            self._sink: Sink = make(*given)
        except Exception as error:
            cause = self._describe(error)
            what = f"the class raised on (args, run_dir): {cause}" if name.startswith("--sink-path") else cause
            raise HookError(f"cannot open the sink of {name}: {what}; fix its cause, or remove the flag") from error

    def write(self, record: Record) -> None:
        if self._failed:
            return
        try:
            self._sink.write(dict(record))
        except Exception as error:
            self._failed = True
            cause = self._describe(error)
            logger.warning(
                "sink of %s failed: write raised %s; the run continues without it, and metrics.jsonl has every record", self._name, cause
            )

    def close(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            logger.warning("sink of %s failed: close raised %s", self._name, self._describe(error))

    def _describe(self, error: Exception) -> str:
        """Describe an exception without passwords in URLs: MLflow's errors contain its server's URL as in MLFLOW_TRACKING_URI."""
        return hide_credentials(describe_exception(error, self._hook))
