"""LoRA of MoE experts: PEFT's definition, files and merges, on one rank and two, in the embedded engine and in conversions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from fuligo.convert.merge_adapter import merge_adapter
from fuligo.engines.embedded.attention import AttentionPlan
from fuligo.engines.embedded.model import EngineModel
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import ADAPTER, EXPERT_PARAMETERS, AdapterConfig
from fuligo.formats.receiver import WeightStore
from fuligo.formats.stored_experts import StoredExperts
from fuligo.formats.weight_manifest import weights_checksum
from fuligo.models.adapter import add_adapter, empty_model, linear_layers, read_adapter_weights
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, train_batches
from tests.peft_oracle import logprobs_of, require_same_as_peft, save_random_adapter

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 4)]
OTHER_LAYERS = ["mlp.gate_proj", "mlp.down_proj", "shared_experts.up_proj", "shared_experts.down_proj"]
"""Layers with names of experts' matrices, which PEFT adapts as parameters."""
FAMILIES = ["qwen3_moe", "glm4_moe", "deepseek_v3"]


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an MoE model; two of the families also have dense layers and shared experts."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an adapter of random values by PEFT. Its rank is not a multiple of what grouped products need."""
    others = [f"{layer}.weight" for layer in OTHER_LAYERS] if base_has_others(base) else []
    parameters = [*(f"mlp.{name}" for name in EXPERT_PARAMETERS), *others]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["o_proj"], target_parameters=parameters)
    return save_random_adapter(base, config, tmp_path_factory.mktemp("adapter"))


def base_has_others(base: Path) -> bool:
    return any(name.endswith("shared_experts.up_proj") for name in linear_layers(empty_model(base)))


def settings_of(base: Path, adapter: Path, **overrides: Any) -> TorchTrainerSettings:
    return TorchTrainerSettings(
        hf_checkpoint=base,
        initial_weights=base,
        reference_weights=base,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-2)),
        lora=LoraSettings(AdapterConfig.read(adapter), initial_adapter=adapter),
        **overrides,
    )


def by_peft(base: Path, adapter: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    return PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False, **options).double()


@pytest.mark.parametrize("recomputes", [False, True])
def test_log_probabilities_and_gradients_are_those_of_peft(base: Path, adapter: Path, recomputes: bool) -> None:
    loss = LossSettings(loss_type="sft_loss", per_token=True)
    worker = TorchRankWorker(settings_of(base, adapter, loss=loss, gradient_checkpointing=recomputes), World())
    require_same_as_peft(worker, by_peft(base, adapter, is_trainable=True), LENGTHS, gradient_bound=1e-5)


def test_peft_loads_and_merges_what_is_saved(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Checks the merged weights of the trainer and of the conversion, whose files store experts one by one."""
    worker = TorchRankWorker(settings_of(base, adapter), World())
    samples = shares.scored(worker, train_batches.samples(LENGTHS))
    base_of = AutoModelForCausalLM.from_pretrained(base)
    for sample in samples:  # the reference is the model without its adapter
        np.testing.assert_allclose(sample.ref_logprobs, logprobs_of(base_of, sample).detach().numpy(), atol=1e-5)
    worker.train(shares.to_train(worker, train_batches.batch(samples)))
    worker.save(tmp_path)
    assert replace(AdapterConfig.read(tmp_path / ADAPTER), base="") == replace(AdapterConfig.read(adapter), base="")
    theirs = by_peft(base, tmp_path / ADAPTER).merge_and_unload().state_dict()
    for name, tensor in worker.named_weights():
        torch.testing.assert_close(tensor.double(), theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    merge_adapter(base, tmp_path / ADAPTER, tmp_path / "merged")
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(tensor.double(), theirs[name].to(tensor.dtype).double(), rtol=1e-5, atol=1e-6, msg=name)


@torch.no_grad()
def test_the_embedded_engine_applies_what_a_sync_sends(base: Path, adapter: Path) -> None:
    model = EngineModel(str(base), torch.device("cpu"), torch.float32, adapter=AdapterConfig.read(adapter))
    store, tensors = WeightStore(model.module, experts=StoredExperts.APART), list(read_adapter_weights(adapter).items())
    store.load_tensors(tensors, 1)
    assert store.adapter_digest == weights_checksum(tensors).checksum
    ids = torch.arange(5, 25)
    logits = model.forward(ids, torch.arange(len(ids)), AttentionPlan([], [0, len(ids)]))
    torch.testing.assert_close(logits, by_peft(base, adapter)(input_ids=ids[None]).logits[0].float(), rtol=1e-4, atol=1e-4)


# Ranks shard all parameters alike; the families differ in which they have, and two of the three have those of the first as well.
@pytest.mark.long
@pytest.mark.parametrize("base", [*(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[:2]), FAMILIES[2]], indirect=True)
@pytest.mark.usefixtures("warm_children")
async def test_two_ranks_train_as_one(base: Path, adapter: Path) -> None:
    samples = train_batches.samples([*LENGTHS, (3, 7), (2, 8)])
    results = {}
    for num_ranks in (1, 2):
        trainer = LocalTrainer(settings_of(base, adapter, num_ranks=num_ranks, gradient_checkpointing=True))
        await trainer.load()
        for _ in range(2):
            result = await trainer.train(train_batches.batch(samples))
        results[num_ranks] = result
        await trainer.close()
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert results[2].metrics[name] == pytest.approx(results[1].metrics[name], rel=1e-5), name
    for position, score in results[1].scores.items():
        np.testing.assert_allclose(results[2].scores[position].logprobs, score.logprobs, atol=1e-5)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts to adapt"):
        add_adapter(tiny.model("qwen3"), AdapterConfig(rank=2, alpha=4.0, adapts_experts=True), seed=0)
