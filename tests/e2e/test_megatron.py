"""Whole runs of the Megatron trainer with the embedded engine, on a CPU: weight syncs, learning, resuming."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fuligo.checkpoint.location import newest_iteration
from fuligo.convert.compare import compare
from tests import tiny
from tests.e2e.command import REPOSITORY, fail, fuligo, succeed, train_command
from tests.e2e.conftest import Job
from tests.e2e.records import TOKENS, checkpoint, metrics, sample_rows
from tests.megatron.checkpoints import save_uneven
from tests.megatron.prediction_fixture import PredictingModel

pytestmark = pytest.mark.megatron

TP2 = {
    "train_backend": "megatron",
    "rollout_backend": "embedded",
    "actor_num_gpus_per_node": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}
PPO = {"advantage_estimator": "ppo", "num_critic_only_steps": 1}
"""A value model beside the policy."""


@pytest.mark.slow  # the adapter below is merged on two pipeline stages, and every sync is compared
def test_the_engine_has_the_weights_of_two_pipeline_stages(job: Job, prompts: Path, tmp_path: Path) -> None:
    stages = {"train_backend": "megatron", "rollout_backend": "embedded", "pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
    evaluation = {"eval_prompt_data": ["sums", f"{prompts}@[0:2]"], "skip_eval_before_train": True}
    succeed(*job(**stages, **evaluation, check_weight_update_equal=True, num_rollout=2, run_dir=tmp_path / "run"))
    records = metrics(tmp_path / "run")
    assert len(records) == 2
    assert max(record["train/logprob_abs_diff"] for record in records) < 1e-4


@pytest.mark.slow  # tests/megatron/test_training.py compares its steps with the torch trainer's, which test_quickstart.py tests
def test_it_learns_and_the_engine_has_its_weights(tmp_path: Path) -> None:
    """The quickstart's task on two pipeline stages: the reward rises, and engine and trainer agree on log-probabilities."""
    assets, run_dir = REPOSITORY / "fuligo" / "quickstart" / "assets", tmp_path / "run"
    succeed(
        *("train", "--config", assets / "config.yaml", "--hf-checkpoint", assets / "model", "--prompt-data", assets / "train.jsonl"),
        *("--train-backend", "megatron", "--rollout-backend", "embedded", "--pipeline-model-parallel-size", 2),
        *("--actor-num-gpus-per-node", 2, "--num-rollout", 7, "--run-dir", run_dir, "--progress", "plain"),
        *("--eval-prompt-data", "sums", f"{assets / 'test.jsonl'}@[0:2]", "--skip-eval-before-train"),
    )
    records = metrics(run_dir)
    assert max(record["train/logprob_abs_diff"] for record in records) < 1e-4
    rewards = [record["rollout/reward_mean"] for record in records]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.2


def save_qwen3_moe(directory: Path) -> None:
    save_uneven(directory, "qwen3_moe")


def save_glm4_moe_lite(directory: Path) -> None:
    """Save a model with latent attention, router score corrections and an MTP layer, which the engine lacks."""
    PredictingModel.random("glm4_moe_lite").save(directory)


@pytest.mark.parametrize(
    ("save", "flags"),
    [
        pytest.param(save_qwen3_moe, {}, marks=pytest.mark.slow),
        (save_glm4_moe_lite, {"mtp_num_layers": 1, "enable_mtp_training": True, "moe_router_bias_update_rate": 0.01, **PPO}),
    ],
)
def test_the_engine_has_the_weights_of_a_mixture(
    prompts: Path, tmp_path: Path, save: Callable[[Path], None], flags: dict[str, object]
) -> None:
    """The ranks shard matrices and experts; every weight sync is checked by checksum."""
    (model := tmp_path / "model").mkdir()
    save(model)
    tiny.tokenizer().save_pretrained(model)
    layout = {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **flags}
    succeed(*train_command(model, prompts, **layout, check_weight_update_equal=True, run_dir=tmp_path / "run"))
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert max(record.get("train/logprob_abs_diff", 0.0) for record in records) < 1e-4
    assert "train/logprob_abs_diff" in records[-1]


@pytest.mark.slow  # tests/megatron/test_checkpoint.py covers the trainer, the test below a resumed run
def test_a_resumed_run_continues_as_if_it_had_not_stopped(job: Job, tmp_path: Path) -> None:
    """With two optimizer steps per rollout under tensor and sequence parallelism; tokens and metrics are bit for bit equal."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    common = {**TP2, **PPO, "num_steps_per_rollout": 2, "save_interval": 1}
    succeed(*job(**common, num_rollout=2, run_dir=whole))
    shutil.copytree(whole, resumed)
    shutil.rmtree(checkpoint(resumed, 2))
    (resumed / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    succeed(*job(**common, num_rollout=2, run_dir=resumed, load=resumed / "checkpoints"))
    assert metrics(resumed) == metrics(whole)
    assert sample_rows(resumed, *TOKENS) == sample_rows(whole, *TOKENS)


def test_a_run_killed_during_a_background_save_resumes_under_another_layout(job: Job, tmp_path: Path) -> None:
    """It resumes from the newest complete checkpoint and exports the last one's weights."""
    run_dir = tmp_path / "run"
    common = {
        **PPO,
        "custom_rm_path": "tests.e2e.killers.reward",
        "rm_type": None,
        "before_train_step_path": "tests.e2e.killers.before_train_step",
        "async_save": True,
        "save_interval": 1,
        "num_rollout": 4,
        "run_dir": run_dir,
        "load": run_dir / "checkpoints",
        "save_hf": tmp_path / "export" / "{rollout_id}",
    }
    assert fuligo(*job(**common, **TP2), KILL_AT="save:2").returncode == -signal.SIGKILL
    assert newest_iteration(run_dir / "checkpoints") in (1, 2, 3)  # the kill may come after the save
    pp2 = {**TP2, "tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 2}
    succeed(*job(**common, **pp2))
    assert [record["step"] for record in metrics(run_dir)] == [0, 1, 2, 3]
    assert not list((run_dir / "checkpoints").glob(".tmp_*"))
    differing = [result.name for result in compare(checkpoint(run_dir, 4), tmp_path / "export" / "3") if result.difference]
    assert not differing


def test_an_adapter_resumes_under_another_layout_and_another_sync(job: Job, tmp_path: Path) -> None:
    """Killed while it saves; then the engine gets merged weights instead of the adapter. Every sync compares all weights."""
    run_dir = tmp_path / "run"
    common = {
        "lora_rank": 4,
        "lr": 1e-3,
        "check_weight_update_equal": True,
        "custom_rm_path": "tests.e2e.killers.reward",
        "rm_type": None,
        "before_train_step_path": "tests.e2e.killers.before_train_step",
        "save_interval": 1,
        "num_rollout": 3,
        "run_dir": run_dir,
        "load": run_dir / "checkpoints",
        "save_hf": tmp_path / "export" / "{rollout_id}",
    }
    assert fuligo(*job(**common, **TP2), KILL_AT="save:2").returncode == -signal.SIGKILL
    pp2 = {**TP2, "tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 2}
    succeed(*job(**common, **pp2, lora_sync="merged"))
    records = metrics(run_dir)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert max(record.get("train/logprob_abs_diff", 0.0) for record in records) < 1e-4
    exported = load_file(tmp_path / "export" / "2" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in exported.items() if "lora_B" in name)


def test_what_the_trainer_would_ignore_is_refused_before_anything_starts(job: Job, tmp_path: Path) -> None:
    text = fail(2, *job(**TP2, attention_dropout=0.1, run_dir=tmp_path / "run"))
    assert "--attention-dropout 0.1: not supported by the Megatron trainer; remove it" in text
    assert not (tmp_path / "run").exists()
