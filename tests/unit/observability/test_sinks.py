"""Sinks: records arrive, and missing packages are reported at the start."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fuligo.config import Config
from fuligo.errors import ConfigError, FuligoError
from fuligo.observability.sinks import TensorBoardSink, open_sinks
from tests.small_disk import SmallDisk


def config(**flags: object) -> Config:
    return Config.model_validate({"observability": flags})


def test_no_sink_is_opened_by_default(tmp_path: Path) -> None:
    assert open_sinks(Config(), tmp_path, start=0) == []


@pytest.mark.parametrize(
    ("flag", "package"), [("use_tensorboard", "tensorboard"), ("use_wandb", "wandb"), ("use_trackio", "trackio"), ("use_mlflow", "mlflow")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"--{flag.replace('_', '-')} needs the package {package}.*pip install 'fuligo\[{package}\]'"):
        open_sinks(config(**{flag: True}), tmp_path, start=0)
    assert not list(tmp_path.iterdir()), "nothing is started"


def test_all_missing_packages_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        open_sinks(config(use_mlflow=True, use_wandb=True), tmp_path, start=0)
    assert [problem.split()[0] for problem in caught.value.problems] == ["--use-wandb", "--use-mlflow"]


def test_tensorboard_discards_records_that_a_resume_overwrote(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, stop, value in ((0, 4, 1.0), (2, 5, 2.0)):
        sink = TensorBoardSink(tmp_path, start=start)
        for step in range(start, stop):
            sink.write({"step": step, "time": 1000.0 + value * 100 + step, "rollout/reward_mean": value, "policy_version": step})
        sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("rollout/reward_mean")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert scalars[2].wall_time == 1202.0
    assert events.Tags()["scalars"] == ["rollout/reward_mean", "policy_version"]


def test_tensorboard_keeps_the_evaluation_at_which_a_run_resumes(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, stop, kept in ((0, 5, []), (2, 4, [{"num_rollouts": 2, "eval/aime/mean@1": 2.0}])):
        (sink,) = open_sinks(config(use_tensorboard=True), tmp_path, start=start, kept=kept)
        for step in range(start + len(kept), stop):
            sink.write({"step": step, "time": 1000.0 + step, "eval/aime/mean@1": float(step)})
        sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("eval/aime/mean@1")] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_tensorboard_on_a_full_disk_fails_the_write_and_not_the_close(small_disk: SmallDisk) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(small_disk.path / "tensorboard", start=0)
    small_disk.fill()
    with pytest.raises(FuligoError, match=r"cannot write .*tensorboard.*: No space left on device \(0 of 4 MiB are free"):
        for step in range(1000):  # the rest of its last block
            sink.write({"step": step, "time": 1.0, "rollout/reward_mean": 1.0})
    sink.close()


def test_wandb_offline_continues_its_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for _ in range(2):
        (sink,) = open_sinks(config(use_wandb=True, wandb_project="fuligo", wandb_mode="offline"), tmp_path, start=0)
        sink.write({"step": 0, "time": 1.0, "rollout/reward_mean": 0.5})
        sink.close()
    run_id = (tmp_path / "wandb" / "run-id.txt").read_text()
    assert list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    run_dir = tmp_path / "run-7"
    run_dir.mkdir()
    for step in (0, 1):
        (sink,) = open_sinks(config(use_mlflow=True, tracking_project="sums"), run_dir, start=step)
        sink.write({"step": step, "time": 1000.0 + step, "eval/aime/mean@1": step / 2})
        sink.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert run.info.run_name == "run-7"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"use_mlflow": "True", "tracking_project": "sums"}
    history = client.get_metric_history(run.info.run_id, "eval/aime/mean_at_1")
    assert [(point.step, point.value, point.timestamp) for point in history] == [(0, 0.0, 1000000), (1, 0.5, 1001000)]


class RecordedTrackio:
    """Stand-in for the module trackio: records the calls of its documented API."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init(
        self, project: str, name: str | None = None, *, config: dict[str, Any], resume: str, private: bool, embed: bool
    ) -> RecordedTrackio:
        assert private
        self.calls.append(("init", project, name, config["observability"]["use_trackio"], resume, embed))
        return self

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step == 2:
            raise ConnectionError("the Space sleeps: https://me:hunter2@space/api")
        self.calls.append(("log", metrics, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_trackio_gets_metrics_by_step_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = RecordedTrackio()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "trackio", module)
    (sink,) = open_sinks(config(use_trackio=True), tmp_path, start=0)
    for step in range(4):
        sink.write({"step": step, "time": 1.0, "train/loss": 0.5})
    sink.close()
    assert module.calls == [
        ("init", "fuligo", tmp_path.name, True, "allow", False),
        ("log", {"train/loss": 0.5}, 0),
        ("log", {"train/loss": 0.5}, 1),
        ("finish",),
    ]
    assert "--use-trackio failed: write raised ConnectionError: the Space sleeps: https://***@space/api" in caplog.messages[0]


class Records:
    """Sink that keeps what it receives."""

    opened: ClassVar[list[Records]] = []

    def __init__(self, args: Any, run_dir: Path) -> None:
        self.given = (args.wandb_project, run_dir)
        self.records: list[dict[str, Any]] = []
        self.closed = False
        Records.opened.append(self)

    def write(self, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise ConnectionError("the tracker is away")
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


class Refuses(Records):
    def __init__(self, args: Any, run_dir: Path) -> None:
        raise ValueError("no token")


def test_a_class_of_the_user_receives_records_and_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sink,) = open_sinks(config(sink_path=f"{__name__}.Records", wandb_project="fuligo"), tmp_path, start=0)
    for step in range(4):
        sink.write({"step": step, "time": 1.0, "eval/aime/mean@1": 0.5})
    sink.close()
    theirs = Records.opened[-1]
    assert theirs.given == ("fuligo", tmp_path)
    assert theirs.records == [{"step": step, "time": 1.0, "eval/aime/mean@1": 0.5} for step in (0, 1)]
    assert theirs.closed
    (warning,) = caplog.messages
    assert "write raised ConnectionError: the tracker is away (test_sinks.py:" in warning


def test_a_class_of_the_user_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sink of --sink-path .*Refuses: the class raised on \(args, run_dir\): ValueError: no token"):
        open_sinks(config(sink_path=f"{__name__}.Refuses"), tmp_path, start=0)
