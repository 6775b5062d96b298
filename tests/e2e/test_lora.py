"""LoRA runs by their commands: killed and resumed, evaluated, merged."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from fuligo.engines.client import EngineClient
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, launch_embedded
from tests.e2e.command import fuligo, succeed
from tests.e2e.conftest import Job
from tests.e2e.records import TOKENS, evaluations, metrics, sample_rows

pytestmark = pytest.mark.timeout(1200)
NUM_ROLLOUTS = 2
LORA = {"lora_rank": 4, "lr": 1e-2, "use_kl_loss": True, "num_rollout": NUM_ROLLOUTS, "save_interval": 1, "num_steps_per_rollout": 2}
SHARED = {"share_prefixes": "on"}  # as other runs do not


@pytest.fixture(scope="module")
def command(job: Job) -> list[str]:
    killers = {"custom_rm_path": "tests.e2e.killers.reward", "before_train_step_path": "tests.e2e.killers.before_train_step"}
    return job(**LORA, **SHARED, rm_type=None, **killers)


@pytest.fixture(scope="module")
def uninterrupted(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    succeed(*command, "--run-dir", run_dir)
    return run_dir


def adapter(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"iter_{NUM_ROLLOUTS:07d}" / "adapter"


@pytest.mark.slow  # test_many.py kills and resumes runs with adapters
def test_killed_and_resumed_run_equals_an_uninterrupted_one(command: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*command, "--run-dir", run_dir, "--load", run_dir / "checkpoints"]
    assert fuligo(*flags, KILL_AT="train:1").returncode == -signal.SIGKILL
    succeed(*flags)
    assert metrics(run_dir) == metrics(uninterrupted)
    assert sample_rows(run_dir, *TOKENS) == sample_rows(uninterrupted, *TOKENS)
    weights = "adapter_model.safetensors"
    assert (adapter(run_dir) / weights).read_bytes() == (adapter(uninterrupted) / weights).read_bytes()
    recorded = (run_dir / "adapters.jsonl").read_text()
    assert recorded == (uninterrupted / "adapters.jsonl").read_text()
    lines = [json.loads(line) for line in recorded.splitlines()]
    assert [line["version"] for line in lines] == list(range(NUM_ROLLOUTS + 1))
    assert len({line["adapter"]["checksum"] for line in lines}) == NUM_ROLLOUTS + 1


@pytest.mark.slow  # test_restarts.py restarts ranks, and the test above restores an adapter from the same files
def test_a_run_that_loses_its_rank_equals_an_uninterrupted_one(job: Job, uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    hooks = {"custom_rm_path": "tests.e2e.killers.reward", "before_train_step_path": "tests.e2e.killers.kill_ranks"}
    said = succeed(*job(**LORA, **SHARED, rm_type=None, **hooks), "--run-dir", run_dir, "--max-restarts", 1, KILL_RANKS="0:1")
    assert "rollout 1 (restart 1 of 1)" in said, said
    assert metrics(run_dir) == metrics(uninterrupted)
    weights = "adapter_model.safetensors"
    assert (adapter(run_dir) / weights).read_bytes() == (adapter(uninterrupted) / weights).read_bytes()
    assert (run_dir / "adapters.jsonl").read_text() == (uninterrupted / "adapters.jsonl").read_text()


@pytest.mark.usefixtures("warm_children")
def test_an_engine_serves_a_checkpoint_s_adapter(checkpoint: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """`fuligo serve --adapter` holds the adapter that the run recorded as its last version."""
    settings = EmbeddedEngineSettings(
        str(checkpoint), tmp_path / "engine.txt", device="cpu", num_threads=1, adapter=adapter(uninterrupted).parent
    )

    async def served() -> str | None:
        engine = await launch_embedded(settings)
        client = EngineClient(engine.url, engine.keys)
        try:
            return (await client.model_info()).adapter_digest
        finally:
            await client.close()
            await engine.stop()

    last = (uninterrupted / "adapters.jsonl").read_text().splitlines()[-1]
    assert asyncio.run(served()) == json.loads(last)["adapter"]["checksum"]


def test_a_checkpoint_is_evaluated_and_merged(uninterrupted: Path, prompts: Path, tmp_path: Path) -> None:
    data = ["--eval-prompt-data", "held_out", f"{prompts}@[0:4]", "--n-samples-per-eval-prompt", 2]
    checkpoints = uninterrupted / "checkpoints"
    succeed("eval", "--config", uninterrupted / "config.yaml", *data, "--load", checkpoints, "--run-dir", tmp_path / "eval")
    assert len(evaluations(tmp_path / "eval")) == 1
    succeed("convert", "merge-adapter", checkpoints, "--save", tmp_path / "merged")
    assert (tmp_path / "merged" / "config.json").is_file()
    assert list((tmp_path / "merged").glob("*.safetensors"))


def test_a_merged_sync_measures_its_rounding(job: Job, tmp_path: Path) -> None:
    """Engines that compute in bf16 lose part of an update; those in float32 report no share."""
    flags = {**LORA, "num_rollout": 1, "lora_sync": "merged", "embedded_dtype": "bf16"}
    succeed(*job(**flags), "--run-dir", tmp_path / "run")
    (record,) = metrics(tmp_path / "run")
    assert 0 < record["train/lora_merged_share"] <= 1


# test_quantized_base.py merges into a quantized base, too
@pytest.mark.parametrize("sync", ["adapter", pytest.param("merged", marks=pytest.mark.slow)])
def test_a_quantized_base_is_sampled_from_as_it_is_trained(job: Job, prompts: Path, tmp_path: Path, sync: str) -> None:
    """QLoRA: each sync is proven, a resume repeats the run, and the checkpoint is evaluated and merged with the same base."""
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    command = job(**{**LORA, "num_rollout": 2, "lora_sync": sync, "lora_base_precision": "nf4", "check_weight_update_equal": True})
    succeed(*command, "--run-dir", tmp_path / "run")
    steps = metrics(tmp_path / "run")
    assert len(steps) == 2
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-4
    saved = tmp_path / "run" / "checkpoints"
    record = json.loads((saved / "iter_0000002" / "adapter" / "base_precision.json").read_text())
    assert record["precision"] == "nf4"
    succeed(*command, "--run-dir", tmp_path / "again", "--load", saved, "--ckpt-step", 1)
    assert metrics(tmp_path / "again") == steps[1:]
    refused = fuligo(*command, "--lora-base-precision", "8bit", "--run-dir", tmp_path / "other", "--load", saved, "--ckpt-step", 1)
    assert refused.returncode != 0
    assert "was trained on a base in nf4" in refused.stdout + refused.stderr
    if sync == "adapter":
        data = ["--eval-prompt-data", "held_out", f"{prompts}@[0:4]", "--n-samples-per-eval-prompt", 1]
        succeed("eval", "--config", tmp_path / "run" / "config.yaml", *data, "--load", saved, "--run-dir", tmp_path / "eval")
        said = succeed("convert", "merge-adapter", saved, "--save", tmp_path / "merged")
        assert "linear layers in nf4" in said
