"""Runs ended by a signal leave no process and no shared memory behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Job, Start
from tests.e2e.processes import alive, descendants, shared_memory, wait_until
from tests.e2e.records import metrics

INTERRUPTED = 130


@pytest.mark.parametrize(
    ("number", "to_all", "while_loading", "exit_code"),
    [
        (signal.SIGINT, True, False, INTERRUPTED),
        pytest.param(signal.SIGINT, True, True, INTERRUPTED, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, False, INTERRUPTED, marks=pytest.mark.slow),
        (signal.SIGTERM, False, True, INTERRUPTED),
        (signal.SIGKILL, False, False, -signal.SIGKILL),
    ],
    ids=["ctrl-c", "ctrl-c-loading", "sigterm", "sigterm-loading", "sigkill"],
)
def test_engine_ranks_and_workers_end_with_the_run(
    number: signal.Signals, to_all: bool, while_loading: bool, exit_code: int, job: Job, start: Start, tmp_path: Path
) -> None:
    """Two trainer ranks, and rewards that need a worker process; a terminal sends Ctrl-C to all of them, and the run saves first.

    SIGTERM goes to a run in the background, which ignores Ctrl-C. Processes that are to be loading have a variable that imports read,
    and so start fresh.
    """
    run_dir = tmp_path / "run"
    command = job(
        rm_type="math",
        rm_num_workers=1,
        custom_generate_function_path="tests.e2e.rewards.algebra",
        actor_num_gpus_per_node=2,
        num_rollout=1000,
        env=json.dumps({"HF_HUB_DISABLE_TELEMETRY": "1"}) if while_loading else None,
        run_dir=run_dir,
    )
    process = start(*command, in_background=number == signal.SIGTERM, warm=True)
    expected = ["fuligo serve", "trainer.ranks.rank"] + ([] if while_loading else ["symbolic_judge"])

    def all_run() -> bool:
        commands = descendants(process.pid).values()
        return all(any(part in command for command in commands) for part in expected)

    if while_loading:
        wait_until(lambda: all_run() or process.poll() is not None, "engine and rank are starting")
    else:
        wait_until(lambda: len(metrics(run_dir)) >= 2 or process.poll() is not None, "two steps are recorded")
    family = descendants(process.pid)
    assert all_run(), family

    if number == signal.SIGTERM and not while_loading:
        os.killpg(process.pid, signal.SIGINT)
        num_steps = len(metrics(run_dir))
        wait_until(lambda: len(metrics(run_dir)) >= num_steps + 2 or process.poll() is not None, "the run goes on after Ctrl-C")
    if to_all:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == exit_code, said
    assert number == signal.SIGKILL or "Traceback" not in said
    assert (
        number == signal.SIGKILL
        or while_loading
        or f"interrupted; run directory: {run_dir}\n{'resume after ' if to_all else 'the run has no checkpoint to resume from'}" in said
    )
    wait_until(lambda: not alive(family), f"all of {family} have ended", timeout_s=120)
    wait_until(lambda: not shared_memory([process.pid, *family]), "shared memory is given back", timeout_s=120)
    assert [record["step"] for record in metrics(run_dir)] == list(range(len(metrics(run_dir)))), "all records are complete"
