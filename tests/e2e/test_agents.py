"""Agents that know nothing of training, trained by whole runs on the embedded engine."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.e2e.command import fail, succeed, train_command
from tests.e2e.conftest import Job
from tests.e2e.records import evaluations, metrics, sample_rows

COLUMNS = (
    "index",
    "group_index",
    "response_ids",
    "loss_mask",
    "engine_logprobs",
    "trainer_logprobs",
    "versions",
    "reward",
    "status",
    "kept",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with room for the prompts of smolagents."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


def train(model: Path, prompts: Path, run_dir: Path, **flags: object) -> list[dict]:
    """Train on the answers of an agent; return the samples that were kept."""
    end_id = tiny.tokenizer().convert_tokens_to_ids("<|end|>")
    settings = {"rm_type": None, "rollout_stop_token_ids": end_id, "n_samples_per_prompt": 2, "max_tokens_per_gpu": 8192, **flags}
    succeed(*train_command(model, prompts, no_skip_zero_advantages=True, run_dir=run_dir, **settings))
    rows = [row for row in sample_rows(run_dir, *COLUMNS) if row["kept"]]
    # The trainer's log-probabilities are those of the engine only if it sees the ids that the engine saw.
    for row in rows:
        trained = np.array(row["loss_mask"]) == 1
        current = trained & (np.array(row["versions"]) == row["step"])
        assert trained.any()
        np.testing.assert_allclose(np.array(row["trainer_logprobs"])[current], np.array(row["engine_logprobs"])[current], atol=1e-4)
    return rows


def test_an_agent_of_the_openai_package_is_trained_across_weight_syncs(model: Path, prompts: Path, tmp_path: Path) -> None:
    rows = train(
        model,
        prompts,
        tmp_path,
        agent="tests.e2e.agents.asks_twice",
        async_mode="full",
        max_staleness=2,
        rollout_max_response_len=24,
        eval_prompt_data=["some", f"{prompts}@[:3]"],
        eval_interval=2,
    )
    assert {row["step"] for row in rows} == {0, 1, 2} and {row["reward"] for row in rows} <= {0.0, 1.0}
    num_branches = Counter(row["index"] for row in rows)
    assert any(num == 1 for num in num_branches.values())
    for row in rows:  # the question in between is not trained on; a turn that the template cannot continue ends its sample
        assert (0 in row["loss_mask"]) == (num_branches[row["index"]] == 1)
    records = metrics(tmp_path)
    assert all(record["rollout/sample/agent_turns"] == 2 and record["rollout/num_failed"] == 0 for record in records)
    assert max(record["rollout/staleness_max"] for record in records) >= 1
    assert [record["num_rollouts"] for record in evaluations(tmp_path)] == [0, 2, 3]


def test_an_agent_of_smolagents_is_trained_with_the_branches_that_it_makes(model: Path, prompts: Path, tmp_path: Path) -> None:
    rows = train(
        model,
        prompts,
        tmp_path,
        agent="tests.e2e.agents.smol",
        reward_key="score",
        num_rollout=2,
        rollout_batch_size=2,
    )
    assert len(rows) > len({row["index"] for row in rows}) == 8, "smolagents rewrites its history, which makes branches"
    assert all(record["rollout/num_failed"] == 0 and record["rollout/reward/steps"] >= 2 for record in metrics(tmp_path))


def test_an_agent_that_contradicts_other_flags_is_refused_before_the_start(job: Job) -> None:
    text = fail(2, *job(agent="tests.e2e.agents.none", custom_generate_function_path="tests.e2e.rewards.algebra"))
    assert "--custom-generate-function-path generates samples too" in text
    assert "--rm-type random has no effect with --agent, whose function returns the reward" in text
