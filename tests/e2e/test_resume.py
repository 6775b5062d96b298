"""A run that is killed at any moment and resumed equals an uninterrupted one."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from fuligo.quantities import count
from tests import tiny
from tests.e2e.command import environment, fuligo, in_own_process, succeed
from tests.e2e.conftest import Job
from tests.e2e.records import TOKENS, evaluations, metrics, sample_rows

INTERRUPTED = 130
NUM_ROLLOUTS = 5


@pytest.fixture(scope="module")
def command(job: Job, prompts: Path) -> list[str]:
    """Return a PPO run, which has the most state to resume: two models, and a first rollout in which only the value model learns."""
    return job(
        advantage_estimator="ppo",
        num_critic_only_steps=1,
        rm_type=None,
        custom_rm_path="tests.e2e.killers.reward",
        before_train_step_path="tests.e2e.killers.before_train_step",
        eval_prompt_data=["held_out", f"{prompts}@[0:4]"],
        eval_interval=2,
        n_samples_per_eval_prompt=2,
        num_rollout=NUM_ROLLOUTS,
        num_steps_per_rollout=2,
        save_interval=1,
    )


@pytest.fixture(scope="module")
def uninterrupted(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    succeed(*command, "--run-dir", run_dir)
    return run_dir


def test_same_seed_same_metrics_and_tokens(command: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    """The second run starts from the config.yaml of the first, in a process with another hash seed."""
    again = in_own_process("train", "--config", uninterrupted / "config.yaml", "--run-dir", tmp_path / "again")
    subprocess.run(again, check=True, timeout=240, env=environment())
    assert metrics(tmp_path / "again") == metrics(uninterrupted)
    assert sample_rows(tmp_path / "again", *TOKENS) == sample_rows(uninterrupted, *TOKENS)


def test_saving_beside_training_changes_nothing(command: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    succeed(*command, "--run-dir", tmp_path / "run", "--async-save")
    assert metrics(tmp_path / "run") == metrics(uninterrupted)
    saved, directly = (directory / "checkpoints" / f"iter_{NUM_ROLLOUTS:07d}" for directory in (tmp_path / "run", uninterrupted))
    for model in ("hf", "critic"):
        assert all((saved / model / file.name).read_bytes() == file.read_bytes() for file in (directly / model).iterdir())


MOMENTS = ("rollout:1", "train:2", "save:3")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("moments", [MOMENTS, *(pytest.param((moment,), marks=pytest.mark.slow) for moment in MOMENTS)], ids=" ".join)
def test_killed_and_resumed_run_equals_an_uninterrupted_one(
    moments: tuple[str, ...], command: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = [*command, "--run-dir", run_dir, "--load", run_dir / "checkpoints"]
    for moment in moments:
        assert fuligo(*flags, KILL_AT=moment).returncode == -signal.SIGKILL, moment
        assert len(metrics(run_dir)) < len(metrics(uninterrupted)), "the run was killed before its end"

    succeed(*flags)
    assert metrics(run_dir) == metrics(uninterrupted)
    assert sample_rows(run_dir, *TOKENS) == sample_rows(uninterrupted, *TOKENS)
    assert evaluations(run_dir) == evaluations(uninterrupted)


# Both signals end a run at both moments by the same path.
@pytest.mark.parametrize("numbers", [("SIGINT", "SIGTERM"), pytest.param(("SIGTERM", "SIGINT"), marks=pytest.mark.slow)], ids=" then ".join)
def test_a_run_that_a_signal_ends_saves_the_last_complete_rollout(
    numbers: tuple[str, str], command: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    """While responses are sampled, then in a training step, which is finished first; no checkpoint is scheduled before the end."""
    run_dir = tmp_path / "run"
    flags = [*command, "--run-dir", run_dir, "--load", run_dir / "checkpoints", "--save-interval", "100"]
    flags += ["--save-on-sigterm", "120"]
    for number, moment, num_saved in zip(numbers, ("rollout:1", "train:2"), (1, 3), strict=True):
        done = fuligo(*flags, KILL_AT=moment, KILL_WITH=number)
        assert done.returncode == INTERRUPTED, done.stderr
        assert f"resume after {count(num_saved, 'rollout')} with: fuligo train" in done.stderr
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*")) == ["iter_0000001", "iter_0000003"]

    succeed(*flags)
    assert metrics(run_dir) == metrics(uninterrupted)
    assert sample_rows(run_dir, *TOKENS) == sample_rows(uninterrupted, *TOKENS)
    assert evaluations(run_dir) == evaluations(uninterrupted)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_run_that_a_signal_reaches_in_its_last_training_step_is_complete(number: str, job: Job, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = job(before_train_step_path="tests.e2e.killers.before_train_step", num_rollout=2, save_on_sigterm=120, run_dir=run_dir)
    assert f"run directory: {run_dir}\n" in succeed(*flags, KILL_AT="train:1", KILL_WITH=number)
    assert [path.name for path in (run_dir / "checkpoints").glob("iter_*")] == ["iter_0000002"]


def test_a_run_that_a_malformed_row_ends_saves_the_last_complete_rollout(job: Job, prompts: Path, tmp_path: Path) -> None:
    """The template refuses the row, which is drawn in the third rollout. The same content is resumed with --skip-bad-rows."""
    data, lines = tmp_path / "prompts.jsonl", prompts.read_text().splitlines()
    data.write_text("\n".join([*lines[:10], '{"prompt": "refuse me", "label": "1"}', *lines[10:20]]) + "\n")
    template = "{% if messages[0].content == 'refuse me' %}{{ raise_exception('refused') }}{% endif %}" + tiny.CHAT_TEMPLATE

    def command(name: str, **changes: object) -> list[str]:
        return job(
            prompt_data=data,
            apply_chat_template_kwargs=json.dumps({"chat_template": template}),
            rollout_shuffle=None,
            num_rollout=4,
            run_dir=tmp_path / name,
            **changes,
        )

    failed = fuligo(*command("run"))
    assert failed.returncode == 2 and f"{data}, line 11: the chat template rejects the messages" in failed.stderr, failed.stderr
    assert "saved its last complete rollout; resume with: fuligo train --config" in failed.stdout
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("iter_*")] == ["iter_0000002"]
    resumed = succeed(*command("run", load=tmp_path / "run" / "checkpoints", skip_bad_rows=True))
    assert f"resuming from {tmp_path / 'run' / 'checkpoints' / 'iter_0000002'}, after 2 of 4 rollouts\n" in resumed
    succeed(*command("other", skip_bad_rows=True))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "other")
    assert sample_rows(tmp_path / "run", *TOKENS) == sample_rows(tmp_path / "other", *TOKENS)


def test_a_run_without_a_last_checkpoint_ends_at_once_on_ctrl_c(job: Job, tmp_path: Path) -> None:
    flags = job(rm_type=None, custom_rm_path="tests.e2e.killers.reward", no_save_last=True, run_dir=tmp_path / "run")
    done = fuligo(*flags, KILL_AT="rollout:1", KILL_WITH="SIGINT")
    assert done.returncode == INTERRUPTED
    assert "the run has no checkpoint to resume from" in done.stderr and not list((tmp_path / "run").glob("checkpoints/iter_*"))
