"""An SGLang engine as a teacher: its scores of given tokens through the router equal those of transformers."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from tests import tiny
from tests.e2e.conftest import Start, start
from tests.e2e.records import metrics, sample_rows
from tests.sglang import oracle
from tests.sglang.engines import ENVIRONMENT, sglang_python

__all__ = ["start"]


async def test_given_tokens_are_scored_at_temperature_1(engines: EngineGroup, checkpoint: Path) -> None:
    """Including a prompt that another sample's request has cached, and the last id of the vocabulary."""
    await engines.update_weights_from_disk(str(checkpoint), version=0)
    model = oracle.load(checkpoint)
    rng = np.random.default_rng(0)
    texts = [(prompt, rng.integers(10, 400, size=1 + 7 * n).astype(np.int32)) for n, prompt in enumerate(oracle.PROMPTS)]
    texts[-1][1][3] = 399
    for prompt in oracle.PROMPTS:
        await engines.generate(prompt, SamplingParams(max_new_tokens=2), rid=f"warm-{len(prompt)}")
    scored = await asyncio.gather(
        *(
            engines.score(np.concatenate([np.array(prompt, np.int32), response]), len(prompt), rid=f"score-{n}-{time}")
            for time in range(2)
            for n, (prompt, response) in enumerate(texts)
        )
    )
    for (prompt, response), logprobs in zip(texts * 2, scored, strict=True):
        np.testing.assert_allclose(logprobs, oracle.logprobs(model, prompt, response), atol=oracle.TOLERANCE)


@pytest.mark.slow
def test_a_run_has_its_teacher_beside_its_engine(start: Start, tmp_path: Path) -> None:
    """The teacher is a model of `--sglang-config` that no weight sync changes; trainer, engine and teacher take turns on the devices."""
    teacher = tiny.save_checkpoint(tmp_path / "teacher", seed=3, layers=1, vocab_size=400)
    student = tiny.save_checkpoint(tmp_path / "student", seed=4, vocab_size=400)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"input": "what is {n} + {n}"}}\n' for n in range(8)))
    models = [
        {"name": "default", "server_groups": [{"num_gpus": 1}]},
        {"name": "teacher", "model_path": str(teacher), "update_weights": False, "server_groups": [{"num_gpus": 1}]},
    ]
    (tmp_path / "engines.yaml").write_text(json.dumps({"sglang": models}))
    process = start(
        *(
            "train",
            "--hf-checkpoint",
            student,
            "--prompt-data",
            tmp_path / "prompts.jsonl",
            "--num-rollout",
            2,
            "--run-dir",
            tmp_path / "run",
        ),
        *("--rollout-backend", "sglang", "--sglang-config", tmp_path / "engines.yaml", "--colocate", "--actor-num-gpus-per-node", 2),
        *("--rollout-num-gpus", 2, "--engine-python", sglang_python(), "--engine-env", json.dumps(ENVIRONMENT), "--device", "cpu"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8, "--use-opd", "--progress", "plain"),
    )
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    model = oracle.load(teacher)
    rows = sample_rows(tmp_path / "run", "prompt_ids", "response_ids", "teacher_logprobs", "error")
    assert [row["error"] for row in rows] == [None] * 16
    for row in rows:
        expected = oracle.logprobs(model, row["prompt_ids"], np.array(row["response_ids"]))
        np.testing.assert_allclose(row["teacher_logprobs"], expected, atol=oracle.TOLERANCE)
    assert all(np.isfinite(step["train/opd_reverse_kl"]) for step in metrics(tmp_path / "run"))
