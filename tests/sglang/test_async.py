"""Asynchronous modes on real engines: tokens stay within the allowed staleness, and evaluations run in between."""

import json
from pathlib import Path

import numpy as np
import pytest

from fuligo.engines.sglang.fleet import Fleet
from tests.e2e.command import succeed
from tests.e2e.conftest import Job, job, prompts
from tests.e2e.records import evaluations, metrics, sample_rows
from tests.sglang.conftest import KEYS
from tests.sglang.engines import ENVIRONMENT, MEMORY, sglang_python

__all__ = ["job", "prompts"]

NUM_ROLLOUT = 5


@pytest.mark.parametrize(
    "mode",
    [
        # tests/e2e/test_modes.py and a run of test_many.py are one step ahead, and the other mode interrupts requests as well
        pytest.param({"async_mode": "one-step"}, marks=pytest.mark.slow),
        {"async_mode": "full", "max_staleness": 1},
    ],
    ids=["one-step", "full"],
)
def test_no_token_is_older_than_the_mode_allows(mode: dict, running: Fleet, job: Job, prompts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    succeed(
        *job(
            **mode,
            rollout_external_engine_addrs=list(running.group.urls),
            check_weight_update_equal=True,
            no_skip_zero_advantages=True,
            embedded_num_threads=None,
            rollout_max_response_len=48,
            eval_prompt_data=["some", f"{prompts}@[:4]"],
            eval_interval=2,
            num_rollout=NUM_ROLLOUT,
            run_dir=run_dir,
        ),
        FULIGO_ENGINE_KEY=KEYS.requests,
        FULIGO_ENGINE_ADMIN_KEY=KEYS.control,
    )
    rows = [row for row in sample_rows(run_dir, "kept", "versions", "engine_logprobs", "trainer_logprobs") if row["kept"]]
    ages = [np.array(row["step"]) - np.array(row["versions"]) for row in rows]
    by_step = {step: [age for row, age in zip(rows, ages) if row["step"] == step] for step in range(NUM_ROLLOUT)}
    assert all(len(of_step) == 16 for of_step in by_step.values())
    oldest = [max(int(age.max()) for age in of_step) for of_step in by_step.values()]
    assert [record["rollout/staleness_max"] for record in metrics(run_dir)] == oldest
    if mode["async_mode"] == "one-step":
        assert all(set(age.tolist()) == {min(step, 1)} for step, of_step in by_step.items() for age in of_step)
    else:
        assert oldest[0] == 0 and max(oldest) == 1 and min(int(age.min()) for age in ages) == 0

    current = [age == 0 for age in ages]
    sampled, trained = (
        np.concatenate([np.array(row[side])[now] for row, now in zip(rows, current)]) for side in ("engine_logprobs", "trainer_logprobs")
    )
    assert np.abs(sampled - trained).max() < 1e-3, "engines sampled with the recorded versions of the weights"
    assert [record["num_rollouts"] for record in evaluations(run_dir)] == [0, 2, 4, 5]


def test_responses_over_weight_syncs_are_not_interrupted(job: Job, prompts: Path, tmp_path: Path) -> None:
    """They have one span, and log-probabilities near those of the trainer although some keys are of older weights."""
    run_dir = tmp_path / "run"
    succeed(
        *job(
            async_mode="full",
            max_staleness=2,
            update_weight_requests="continue",
            rollout_backend="sglang",
            rollout_num_gpus=1,
            actor_num_gpus_per_node=1,
            engine_python=sglang_python(),
            engine_env=json.dumps(ENVIRONMENT),
            sglang_mem_fraction_static=MEMORY["mem_fraction_static"],
            check_weight_update_equal=True,
            no_skip_zero_advantages=True,
            embedded_num_threads=None,
            rollout_batch_size=2,
            rollout_max_response_len=200,
            num_rollout=NUM_ROLLOUT,
            rollout_concurrency=2,  # sampling takes longer than training, so that requests are in flight at a weight sync
            run_dir=run_dir,
        )
    )
    rows = [row for row in sample_rows(run_dir, "kept", "versions", "engine_logprobs", "trainer_logprobs", "spans") if row["kept"]]
    assert all(max(row["step"] - version for version in row["versions"]) <= 2 for row in rows)
    over = [row for row in rows if len(set(row["versions"])) > 1]
    assert over and all(len([span for span in row["spans"] if span["name"] == "generate"]) == 1 for row in rows)
    assert all((np.diff(row["versions"]) >= 0).all() for row in over)
