"""No prompt is lost or used twice under over-sampling, filters, partial rollout, asynchronous modes and a kill."""

import signal
from pathlib import Path

import pytest

from tests.e2e.command import fuligo, succeed
from tests.e2e.conftest import NUM_PROMPTS, Job
from tests.e2e.records import assert_every_prompt_is_accounted_for, metrics, sample_rows

NUM_SAMPLES = 4
NUM_ROLLOUT = 5
KILLED_IN = 3
PROMPTS = [f"what is {n} + {n}?" for n in range(10, 10 + NUM_PROMPTS)]
"""Prompt text of each row."""


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"partial_rollout": True}, marks=pytest.mark.slow),
        pytest.param({"async_mode": "one-step"}, marks=pytest.mark.slow),
        {"async_mode": "one-step", "partial_rollout": True, "max_staleness": 1},
        {"async_mode": "full", "max_staleness": 1, "over_sampling_batch_size": None},
    ],
    ids=["partial", "one-step", "one-step-partial", "full"],
)
def test_every_prompt_ends_once_or_waits_once(mode: dict, job: Job, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {"over_sampling_batch_size": 8, **mode}
    command = job(
        **settings,
        rm_type=None,
        custom_rm_path="tests.e2e.killers.reward",
        dynamic_sampling_filter_path="tests.e2e.killers.drop_some",
        n_samples_per_prompt=NUM_SAMPLES,
        rollout_max_response_len=32,
        embedded_max_running_requests=10,  # so that some samples have not begun when a rollout is full
        num_rollout=NUM_ROLLOUT,
        save_interval=2,
        run_dir=run_dir,
        load=run_dir / "checkpoints",
    )
    assert fuligo(*command, KILL_AT=f"rollout:{KILLED_IN}").returncode == -signal.SIGKILL
    assert len(metrics(run_dir)) < NUM_ROLLOUT, "the run was killed before its end"
    succeed(*command)

    rows = sample_rows(run_dir, "index", "group_index", "prompt", "kept", "drop_reason")
    assert [record["step"] for record in metrics(run_dir)] == list(range(NUM_ROLLOUT))
    assert sum(row["kept"] for row in rows) == NUM_ROLLOUT * 4 * NUM_SAMPLES

    assert_every_prompt_is_accounted_for(run_dir, PROMPTS, num_rollouts=NUM_ROLLOUT, num_samples=NUM_SAMPLES)

    if mode.get("async_mode") == "full":
        oldest = {row["step"]: 0 for row in rows}
        for row in sample_rows(run_dir, "kept", "versions"):
            if row["kept"]:
                oldest[row["step"]] = max(oldest[row["step"]], row["step"] - min(row["versions"]))
        assert max(oldest.values()) == 1, "the policy lag reaches its bound of 1"
        return
    assert any(row["drop_reason"] == "aborted" for row in rows), "some groups were aborted"
    if "partial_rollout" in mode:
        assert sum(record["rollout/num_resumed"] for record in metrics(run_dir)) > 0
