"""--max-restarts: a run whose trainer ranks die ends as an undisturbed one, in one command, with the same engine."""

from pathlib import Path

import pytest

from tests.e2e import command as command_module
from tests.e2e.command import fail, succeed
from tests.e2e.conftest import Job
from tests.e2e.records import TOKENS, checkpoint, evaluations, metrics, sample_rows

NUM_ROLLOUTS = 4
pytestmark = pytest.mark.timeout(1200)


MEGATRON = {"train_backend": "megatron", "rollout_backend": "embedded", "pipeline_model_parallel_size": 2}


@pytest.fixture(
    scope="module",
    params=[
        {},
        pytest.param({"launcher": "ray"}, marks=pytest.mark.slow),
        pytest.param(MEGATRON, marks=[pytest.mark.slow, pytest.mark.megatron]),
    ],
    ids=["torch", "torch on Ray", "Megatron"],
)
def command(request: pytest.FixtureRequest, job: Job, prompts: Path) -> list[str]:
    return job(
        **request.param,
        actor_num_gpus_per_node=2,
        rm_type=None,
        custom_rm_path="tests.e2e.killers.reward",
        before_train_step_path="tests.e2e.killers.kill_ranks",
        eval_prompt_data=["held_out", f"{prompts}@[0:4]"],
        eval_interval=2,
        check_weight_update_equal=True,
        num_rollout=NUM_ROLLOUTS,
        save_interval=2,
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for restarts: a busy machine imports torch for minutes, and ranks are lost before their standbys have done so."""
    monkeypatch.setattr(command_module, "DEADLINE_S", 900.0)


@pytest.fixture(scope="module")
def undisturbed(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    succeed(*command, "--run-dir", run_dir)
    return run_dir


def weights(run_dir: Path) -> list[bytes]:
    """Return the files of the last checkpoint's weights: those of a Hugging Face directory, or of a distributed checkpoint."""
    directory = checkpoint(run_dir, NUM_ROLLOUTS)
    files = sorted([*directory.glob("hf/*.safetensors"), *directory.glob("*.distcp")])
    assert files
    return [file.read_bytes() for file in files]


def test_a_run_that_loses_ranks_equals_an_undisturbed_one(command: list[str], undisturbed: Path, tmp_path: Path) -> None:
    """Rank 1 dies before the first checkpoint, rank 0 after one, each a step or two after the state to which the restart returns."""
    run_dir = tmp_path / "run"
    said = succeed(*command, "--run-dir", run_dir, "--max-restarts", 2, KILL_RANKS="1:1 0:3")
    assert "restarting the trainer from the start of the run (restart 1 of 2)" in said, said
    assert f"restarting the trainer from {checkpoint(run_dir, 2)}, rollout 2 (restart 2 of 2)" in said, said
    assert metrics(run_dir) == metrics(undisturbed)
    assert sample_rows(run_dir, *TOKENS) == sample_rows(undisturbed, *TOKENS)
    assert evaluations(run_dir) == evaluations(undisturbed)
    assert weights(run_dir) == weights(undisturbed)

    steps, engines = zip(*(line.split(maxsplit=1) for line in (run_dir / "engines.txt").read_text().splitlines()))
    assert steps == tuple("01012323"), "what was trained, again after each restart"
    assert len(set(engines)) == 1, "one engine served all along"
    if "ray" not in command:
        assert (run_dir / "log.txt").read_text().count("2 of 2 trainer ranks start from standby processes") == 2


def test_a_rank_that_is_lost_once_too_often_ends_the_run(command: list[str], tmp_path: Path) -> None:
    error = fail(1, *command, "--run-dir", tmp_path / "run", "--max-restarts", 1, KILL_RANKS="1:0 0:2")
    assert "error: trainer rank " in error, error
    assert "resume with --load" in error
    assert [record["step"] for record in metrics(tmp_path / "run")] == [0, 1]
