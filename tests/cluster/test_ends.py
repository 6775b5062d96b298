"""However a run on Ray ends, it names the reason, can be resumed, and leaves no rank, engine or Ray process behind."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import succeed
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


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "is gone"),
        pytest.param(signal.SIGSTOP, "has not answered for 40 s", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_killed_or_stops_ends_the_run_and_it_resumes(
    number: signal.Signals, why: str, job: Job, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = {**RANKS, "save_interval": 1, "run_dir": run_dir}
    process = start(*job(**flags, num_rollout=1000))
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

    done = int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    succeed(*job(**flags, num_rollout=done + 1, load=run_dir / "checkpoints"))
    assert [record["step"] for record in metrics(run_dir)] == list(range(done + 1))


@pytest.mark.parametrize(
    ("number", "to_all", "exit_code"),
    [
        (signal.SIGINT, True, INTERRUPTED),
        pytest.param(signal.SIGTERM, False, INTERRUPTED, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, -signal.SIGKILL, marks=pytest.mark.slow),  # test_launch.py kills a driver of two nodes
    ],
    ids=["ctrl-c", "sigterm", "sigkill"],
)
def test_nothing_stays_behind(number: signal.Signals, to_all: bool, exit_code: int, job: Job, start: Start, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all processes of the run."""
    process = start(*job(**RANKS, num_rollout=1000, run_dir=tmp_path / "run"))
    family = two_steps(tmp_path / "run", process)
    if to_all:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == exit_code, said
    assert number == signal.SIGKILL or "Traceback" not in said
    assert_nothing_left(process.pid, family)
