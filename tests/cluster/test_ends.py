"""However a run on Ray ends, it names the reason, can be resumed, and leaves no rank, engine or Ray process behind."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from fuligo.checkpoint.location import newest_iteration
from tests.e2e.conftest import Job, Start
from tests.e2e.processes import alive, descendants, shared_memory, wait_until
from tests.e2e.records import metrics

RANKS = {"launcher": "ray", "actor_num_gpus_per_node": 2}
INTERRUPTED = 130


def two_steps(run_dir: Path, process: subprocess.Popen[str]) -> dict[int, str]:
    """Wait until the run has trained for two steps; return its processes."""
    wait_until(lambda: len(metrics(run_dir)) >= 2 or process.poll() is not None, "two steps are recorded", timeout_s=240)
    assert process.poll() is None, process.communicate()[0]
    family = descendants(process.pid)
    for part in ("gcs_server", "raylet", "ray::TrainerRank", "ray::NodeAgent", "fuligo serve"):
        assert any(part in command for command in family.values()), (part, family)
    return family


def assert_nothing_left(pid: int, family: dict[int, str]) -> None:
    wait_until(lambda: not alive(family), "all processes have ended", timeout_s=120)
    wait_until(lambda: not shared_memory([pid, *family]), "shared memory is given back", timeout_s=120)


def lose_a_rank(process: subprocess.Popen[str], run_dir: Path, number: signal.Signals, why: str) -> None:
    """Send the signal to a rank after two steps; check that the run ends, says why, and leaves nothing behind."""
    family = two_steps(run_dir, process)
    os.kill(next(pid for pid, command in family.items() if "ray::TrainerRank" in command), number)
    said, _ = process.communicate(timeout=240)
    said = " ".join(said.split())
    assert process.returncode == 1, said
    assert "Traceback" not in said
    assert "trainer rank " in said
    assert f" on 127.0.0.1 {why}" in said, said
    assert re.search(r" (during|after) `\w+`", said), said  # between two commands, the last one is named
    assert "resume with --load" in said
    assert_nothing_left(process.pid, family)


def test_a_run_that_lost_a_rank_resumes_and_leaves_nothing_behind_at_ctrl_c(
    job: Job, start: Start, warm_workers: dict[str, str], tmp_path: Path
) -> None:
    """It resumes on the rank that is left. A terminal sends Ctrl-C to all processes of the run.

    The rank and the agent of the resumed run start fresh; those of the other tests here, except slow tests, are forked.
    """
    run_dir = tmp_path / "run"
    flags = {"save_interval": 1, "run_dir": run_dir, "num_rollout": 1000, "load": run_dir / "checkpoints"}
    lose_a_rank(start(*job(**RANKS, **flags), warm=True, **warm_workers), run_dir, signal.SIGKILL, "was lost")
    done = newest_iteration(run_dir / "checkpoints")
    assert done is not None

    resumed = start(*job(**{**RANKS, "actor_num_gpus_per_node": 1}, **flags), warm=True)
    wait_until(
        lambda: newest_iteration(run_dir / "checkpoints") != done or resumed.poll() is not None, "the resumed run saves", timeout_s=240
    )
    family = two_steps(run_dir, resumed)
    os.killpg(resumed.pid, signal.SIGINT)
    said, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    assert_nothing_left(resumed.pid, family)
    steps = [record["step"] for record in metrics(run_dir)]
    assert steps == list(range(len(steps))) and len(steps) > done


@pytest.mark.slow
def test_a_rank_that_stops_ends_the_run(job: Job, start: Start, tmp_path: Path) -> None:
    """tests/parity/test_torch_trainer_ranks.py tests the same with a shorter deadline."""
    process = start(*job(**RANKS, num_rollout=1000, save_interval=1, run_dir=tmp_path / "run"))
    lose_a_rank(process, tmp_path / "run", signal.SIGSTOP, "has not answered for 40 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)],  # test_launch.py kills a driver of two nodes
    ids=["sigterm", "sigkill"],
)
def test_nothing_stays_behind(number: signal.Signals, exit_code: int, job: Job, start: Start, tmp_path: Path) -> None:
    process = start(*job(**RANKS, num_rollout=1000, run_dir=tmp_path / "run"))
    family = two_steps(tmp_path / "run", process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == exit_code, said
    assert number == signal.SIGKILL or "Traceback" not in said
    assert_nothing_left(process.pid, family)
