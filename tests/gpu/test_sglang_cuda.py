"""Real SGLang engines on one GPU and a trainer on another, or both on the same: weights arrive, and the quickstart's reward rises.

FULIGO_SGLANG_PYTHON is the interpreter that has SGLang and its router, FULIGO_SGLANG_PYTHONPATH its additional module path.
"""

import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.e2e.records import metrics
from tests.fp8 import save_family
from tests.gpu.sglang_runs import PYTHON, train_on_sglang

ASSETS = Path(str(files("fuligo.quickstart"))) / "assets"

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the trainer needs one GPU, the engine another"),
]
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
MEGATRON = pytest.param("megatron", marks=needs_megatron)


@pytest.mark.parametrize(
    ("transport", "mode", "backend"),
    [
        ("nccl", "sync", "torch"),
        ("nccl", "one-step", "torch"),
        ("disk", "sync", "torch"),
        pytest.param("nccl", "sync", "megatron", marks=needs_megatron),
    ],
)
def test_the_reward_rises_on_two_gpus(tmp_path: Path, transport: str, mode: str, backend: str) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, update_weight_transport=transport, async_mode=mode, train_backend=backend, num_rollout=12)
    steps = metrics(run_dir)
    assert len(steps) == 12
    assert rise(steps) > 0.3
    assert all(step["train/logprob_abs_diff"] < 0.05 for step in steps)


@pytest.mark.parametrize("backend", ["torch", MEGATRON])
def test_a_value_model_learns_beside_the_policy(tmp_path: Path, backend: str) -> None:
    run_dir = tmp_path / "run"
    train(
        run_dir,
        advantage_estimator="ppo",
        normalize_advantages=True,
        critic_lr=1e-3,
        num_critic_only_steps=2,
        rollout_batch_size=256,
        n_samples_per_prompt=1,
        train_backend=backend,
        update_weight_transport="nccl",
        num_rollout=12,
    )
    steps = metrics(run_dir)
    assert rise(steps) > 0.3
    assert max(step["train/explained_variance"] for step in steps) > 0.02
    assert all(step["train/logprob_abs_diff"] < 0.05 for step in steps[2:]), "before, the value model learns alone"


@pytest.mark.parametrize("backend", ["torch", MEGATRON])
def test_a_student_comes_near_its_teacher(tmp_path: Path, backend: str) -> None:
    """The teacher is the model that a first run trained."""
    train(
        tmp_path / "teacher", update_weight_transport="nccl", save_hf=tmp_path / "saved" / "{rollout_id}", save_interval=12, num_rollout=12
    )
    (teacher,) = (tmp_path / "saved").iterdir()
    student = tmp_path / "student"
    train(
        student,
        use_opd=True,
        opd_teacher_load=teacher,
        train_backend=backend,
        update_weight_transport="nccl",
        num_rollout=10,
    )
    steps = metrics(student)
    assert steps[-1]["train/opd_reverse_kl"] < 0.5 * steps[0]["train/opd_reverse_kl"]


@needs_megatron
def test_megatron_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, update_weight_transport="nccl", train_backend="megatron", num_rollout=6)
    train(run_dir, update_weight_transport="nccl", train_backend="megatron", num_rollout=12, load=run_dir / "checkpoints")
    steps = metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(12))
    assert rise(steps) > 0.3
    assert all(step["train/logprob_abs_diff"] < 0.05 for step in steps)


@needs_megatron
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite"])
def test_a_mixture_trains_on_the_experts_that_its_engine_chose(family: str, tmp_path: Path) -> None:
    shape = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128} if family == "glm4_moe_lite" else {}
    checkpoint = save_family(tmp_path / "model", family, initializer_range=0.04, **shape)
    run_dir = tmp_path / "run"
    train(
        run_dir,
        hf_checkpoint=checkpoint,
        rm_type="random",
        train_backend="megatron",
        use_rollout_routing_replay=True,
        update_weight_transport="nccl",
        num_rollout=3,
    )
    steps = metrics(run_dir)
    assert len(steps) == 3
    assert all(step["train/logprob_abs_diff"] < 0.02 for step in steps)


@pytest.mark.parametrize("backend", ["torch", MEGATRON])
def test_ray_places_trainer_and_engines_on_the_same_gpus(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    num_gpus = torch.cuda.device_count()
    run_dir = tmp_path / "run"
    train(
        run_dir,
        launcher="ray",
        colocate=True,
        train_backend=backend,
        actor_num_gpus_per_node=num_gpus,
        num_gpus_per_node=num_gpus,
        rollout_num_gpus=num_gpus,
        update_weight_transport="tensor",
        num_rollout=12,
    )
    steps = metrics(run_dir)
    assert len(steps) == 12
    assert rise(steps) > 0.3
    assert all(step["train/logprob_abs_diff"] < 0.05 for step in steps)


def test_engines_that_share_the_trainers_gpu_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine is killed while it samples, then while the trainer has the GPU; each restart finds the same free memory as at first."""
    monkeypatch.setenv("KILL_ENGINES", "sampling:1:0 training:2:0")
    run_dir = tmp_path / "run"
    train(
        run_dir,
        colocate=True,
        use_fault_tolerance=True,
        update_weight_transport="tensor",
        sglang_max_total_tokens=None,
        num_rollout=5,
        dynamic_sampling_filter_path="tests.sglang.engine_killers.keep_all",
        before_train_step_path="tests.sglang.engine_killers.before_train_step",
    )
    steps = metrics(run_dir)
    assert len(steps) == 5
    assert all(step["rollout/num_groups_kept"] == 32 and step["rollout/num_failed"] == 0 for step in steps)
    assert all(step["train/logprob_abs_diff"] < 0.05 for step in steps)
    num_tokens = [int(n) for n in re.findall(r"KV Cache is allocated.*#tokens: (\d+)", (run_dir / "engine-0.txt").read_text())]
    assert len(num_tokens) == 3
    assert min(num_tokens) > 0.95 * num_tokens[0]


def train(run_dir: Path, **changes: object) -> None:
    flags: dict[str, object] = {
        "config": ASSETS / "config.yaml",
        "hf_checkpoint": ASSETS / "model",
        "prompt_data": ASSETS / "train.jsonl",
        "eval_prompt_data": ASSETS / "test.jsonl",
        "run_dir": run_dir,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
    }
    train_on_sglang(timeout_s=500, **{**flags, **changes})


def rise(steps: list[dict[str, float]]) -> float:
    """Return how much the mean reward rises from the first step to the last."""
    return steps[-1]["rollout/reward_mean"] - steps[0]["rollout/reward_mean"]
