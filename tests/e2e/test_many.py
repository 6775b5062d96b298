"""Several runs at once over one trainer and one engine: each equals the same run alone, also killed and resumed, and fails alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.job.many import INTERRUPTED
from tests.e2e.command import environment, fuligo, succeed
from tests.e2e.conftest import Job, Start
from tests.e2e.processes import alive, descendants
from tests.e2e.records import TOKENS, evaluations, json_lines, metrics, sample_rows
from tests.e2e.warm_children import ForkServer

pytestmark = pytest.mark.timeout(1200)
NUM_ROLLOUTS = 2
COMMON = {"num_rollout": NUM_ROLLOUTS, "save_interval": 1, "rm_type": None, "custom_rm_path": "tests.e2e.killers.reward"}
RUNS: Mapping[str, Mapping[str, object]] = {
    "wide": {
        "lora_rank": 8,
        "lr": 1e-2,
        "use_kl_loss": True,
        "num_steps_per_rollout": 2,
        "before_train_step_path": "tests.e2e.killers.kill_all_runs",
    },
    "narrow": {"lora_rank": 2, "lr": 3e-3, "lora_target_modules": ["q_proj", "v_proj"], "seed": 7, "share_prefixes": "on"},
    "judged": {
        "lora_rank": 4,
        "lr": 1e-3,
        "rollout_seed": 5,
        "n_samples_per_prompt": 2,
        "eval_interval": 2,
        "n_samples_per_eval_prompt": 2,
    },
}
"""Runs with different adapters, losses, data and schedules."""
WriteRun = Callable[..., Path]


@pytest.fixture(scope="module")
def write_run(job: Job, prompts: Path) -> WriteRun:
    """Write the config of a run that writes to `directory / name`; return the file."""

    def write(directory: Path, name: str, **changes: object) -> Path:
        held_out = {"eval_prompt_data": ["held_out", f"{prompts}@[0:4]"]} if "eval_interval" in RUNS[name] else {}
        _, *flags = job(**{**COMMON, **RUNS[name], **held_out, "run_dir": directory / name, **changes})
        directory.mkdir(exist_ok=True)
        file = directory / f"{name}.yaml"
        save_yaml(parse(flags).config, file)
        return file

    return write


@pytest.fixture(scope="module")
def alone(write_run: WriteRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make each run alone; return the directory of their run directories."""
    directory = tmp_path_factory.mktemp("alone")
    for name in RUNS:
        succeed("train", "--config", write_run(directory, name))
    return directory


def assert_equal(run: Path, alone: Path) -> None:
    """Check that a run has the metrics, tokens, log-probabilities, adapters and optimizer of another, bit for bit."""
    assert metrics(run) == metrics(alone)
    assert len(metrics(run)) == NUM_ROLLOUTS
    assert sample_rows(run, *TOKENS) == sample_rows(alone, *TOKENS)
    assert evaluations(run) == evaluations(alone)
    recorded = json_lines(run / "adapters.jsonl")
    assert recorded == json_lines(alone / "adapters.jsonl")
    assert [line["version"] for line in recorded] == list(range(NUM_ROLLOUTS + 1))
    assert len({line["adapter"]["checksum"] for line in recorded}) == NUM_ROLLOUTS + 1
    ours, theirs = (path / "checkpoints" / f"iter_{NUM_ROLLOUTS:07d}" for path in (run, alone))
    for file in ("adapter/adapter_model.safetensors", "rng/rank_00000.safetensors", "trainer.json"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    moments = [path.name for path in (theirs / "optimizer").iterdir()]
    assert moments and all((ours / "optimizer" / name).read_bytes() == (theirs / "optimizer" / name).read_bytes() for name in moments)


def test_each_of_several_runs_equals_the_run_alone(alone: Path, write_run: WriteRun, tmp_path: Path) -> None:
    said = succeed("train-many", *(write_run(tmp_path, name) for name in RUNS))
    for name in RUNS:
        assert f"[{name}] step {NUM_ROLLOUTS}/{NUM_ROLLOUTS}" in said
        assert_equal(tmp_path / name, alone / name)


def test_runs_in_half_precision_equal_runs_alone(write_run: WriteRun, tmp_path: Path) -> None:
    """FSDP then shards the adapter alone, and the base stays as it is."""
    half = {"precision": "bf16", "embedded_dtype": "bf16"}
    succeed("train", "--config", write_run(tmp_path / "alone", "narrow", **half))
    succeed("train-many", *(write_run(tmp_path / "together", name, **half) for name in ("wide", "narrow")))
    assert_equal(tmp_path / "together" / "narrow", tmp_path / "alone" / "narrow")


def test_killed_and_resumed_runs_equal_uninterrupted_ones(alone: Path, write_run: WriteRun, tmp_path: Path) -> None:
    """The process that all share is killed in a training step, and the same command resumes each run from where it was."""
    command = ["train-many", *(write_run(tmp_path, name) for name in RUNS), "--resume"]
    assert fuligo(*command, KILL_ALL_AT="1").returncode == -signal.SIGKILL
    assert len(metrics(tmp_path / "wide")) == 1
    succeed(*command)
    for name in RUNS:
        assert_equal(tmp_path / name, alone / name)
    assert succeed(*command) == "", "all are complete"


def test_a_run_that_begins_with_other_weights_is_resumed_before_its_first_checkpoint(
    checkpoint: Path, write_run: WriteRun, tmp_path: Path
) -> None:
    """It replaces the steps that it has recorded."""
    begins = {"load": checkpoint, "save_interval": 1000}
    command = ["train-many", *(write_run(tmp_path, name, **begins) for name in ("wide", "narrow")), "--resume"]
    assert fuligo(*command, KILL_ALL_AT="1").returncode == -signal.SIGKILL
    assert len(metrics(tmp_path / "wide")) == 1
    succeed(*command)
    for name in ("wide", "narrow"):
        assert len(metrics(tmp_path / name)) == NUM_ROLLOUTS


def test_a_run_that_fails_ends_alone(alone: Path, write_run: WriteRun, tmp_path: Path) -> None:
    """Runs that sample ahead go on, too; their log-probabilities depend on arrival times by rounding, as alone."""
    broken = write_run(tmp_path, "wide", custom_rm_path="tests.e2e.rewards.fails_on_all")
    ahead = write_run(tmp_path, "narrow", async_mode="full", max_staleness=1)
    done = fuligo("train-many", ahead, broken, write_run(tmp_path, "judged"))
    assert done.returncode == 1, done.stderr
    assert "the judge is out for lunch" in done.stderr
    assert "1 of 3 runs failed: wide (exit code 1)" in done.stderr
    assert "Traceback" not in done.stderr
    assert_equal(tmp_path / "judged", alone / "judged")
    assert len(metrics(tmp_path / "narrow")) == NUM_ROLLOUTS


def test_runs_whose_processes_end_early_end_alone(alone: Path, write_run: WriteRun, tmp_path: Path) -> None:
    killed = write_run(tmp_path, "wide", before_train_step_path="tests.e2e.killers.before_train_step")
    quiet = write_run(tmp_path, "judged", before_train_step_path="tests.e2e.killers.exit_quietly")
    done = fuligo("train-many", killed, quiet, write_run(tmp_path, "narrow"), KILL_AT="train:1")
    assert done.returncode == 1, done.stderr
    ends = "wide (killed by signal 9), judged (exit code 0 before it was complete: does a hook call os._exit or sys.exit?)"
    assert f"2 of 3 runs failed: {ends}" in done.stderr
    assert_equal(tmp_path / "narrow", alone / "narrow")


def test_runs_from_python(alone: Path, write_run: WriteRun, warm_commands: ForkServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.e2e.train_many", *(str(write_run(tmp_path, name)) for name in ("narrow", "judged"))]
    with warm_commands.serving():
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(tmp_path / name) for name in ("narrow", "judged")]
    assert_equal(tmp_path / "narrow", alone / "narrow")


# Ctrl-C lets them save like SIGTERM, and test_interrupts.py ends a run alone by Ctrl-C
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_all_runs(number: signal.Signals, write_run: WriteRun, start: Start, tmp_path: Path) -> None:
    """They save first, on SIGTERM with --save-on-sigterm."""
    files = [write_run(tmp_path, name, num_rollout=1000, save_interval=1000, save_on_sigterm=60) for name in ("wide", "judged")]
    process = start("train-many", *files, warm=True)
    while not all(metrics(tmp_path / name) for name in ("wide", "judged")):
        assert process.poll() is None
        time.sleep(0.1)
    children = descendants(process.pid)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, said
    assert alive(children) == {}
    for name in ("wide", "judged"):
        assert f"[{name}] interrupted; run directory: {tmp_path / name}" in said
        assert list((tmp_path / name / "checkpoints").glob("iter_*"))
