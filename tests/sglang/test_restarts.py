"""--max-restarts with real engines: they outlive the trainer, and sample with the weights of the checkpoint."""

import json
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import succeed
from tests.e2e.conftest import NUM_PROMPTS, Job, job, prompts
from tests.e2e.records import assert_every_prompt_is_accounted_for, metrics, sample_rows
from tests.sglang.engines import ENVIRONMENT, sglang_python

__all__ = ["job", "prompts"]

NUM_ROLLOUTS = 4
NUM_SAMPLES = 4
SEPARATE = {"update_weight_transport": "gloo", "async_mode": "full", "max_staleness": 1}
SHARED = {"colocate": True, "actor_num_gpus_per_node": 1}


@pytest.mark.parametrize(
    ("mode", "launcher"),
    [
        (SEPARATE, "local"),
        pytest.param(SHARED, "local", marks=pytest.mark.slow),  # test_shared_job.py syncs with engines that come back in turns
        pytest.param(SEPARATE, "ray", marks=pytest.mark.slow),
    ],
    ids=["full, gloo", "colocated", "full, gloo, Ray"],
)
def test_engines_outlive_the_rank_that_sends_their_weights(
    mode: dict, launcher: str, job: Job, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "DEADLINE_S", 500.0)
    run_dir = tmp_path / "run"
    said = succeed(
        *job(
            **mode,
            launcher=launcher,
            rollout_backend="sglang",
            embedded_num_threads=None,
            rollout_num_gpus=1,
            engine_python=sglang_python(),
            engine_env=json.dumps(ENVIRONMENT),
            check_weight_update_equal=True,
            rm_type=None,
            custom_rm_path="tests.e2e.killers.reward",
            before_train_step_path="tests.e2e.killers.kill_ranks",
            n_samples_per_prompt=NUM_SAMPLES,
            num_rollout=NUM_ROLLOUTS,
            save_interval=1,
            max_restarts=1,
            run_dir=run_dir,
        ),
        KILL_RANKS="0:2",
    )
    assert "rollout 2 (restart 1 of 1)" in said, said
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(NUM_ROLLOUTS))
    rows = [row for row in sample_rows(run_dir, "kept", "versions") if row["kept"]]
    assert all(row["step"] - 1 <= min(row["versions"]) <= max(row["versions"]) <= row["step"] for row in rows)
    if not mode.get("async_mode"):
        assert max(record["train/logprob_abs_diff"] for record in records) < 1e-3
    steps, engines = zip(*(line.split(maxsplit=1) for line in (run_dir / "engines.txt").read_text().splitlines()))
    assert steps == ("0", "1", "2", "2", "3")
    assert len(set(engines)) == 1 and engines[0] != "[]", "one engine served all along"
    questions = [f"what is {n} + {n}?" for n in range(10, 10 + NUM_PROMPTS)]
    assert_every_prompt_is_accounted_for(run_dir, questions, num_rollouts=NUM_ROLLOUTS, num_samples=NUM_SAMPLES)
