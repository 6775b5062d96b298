"""Plans of LoRA runs against real models with PEFT's layers: parameters, gradients, optimizer, activations, files."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Glm4Config, Glm4MoeConfig, LlamaConfig, Qwen3Config

from fuligo.config.command_line import parse
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.quantized_base import BasePrecision, QuantizedBase
from fuligo.layout.adapter import AdapterShape
from fuligo.models.adapter import adapter_tensors, add_adapter, linear_layers
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.experts_adapter import has_plain_matrices, stacked_experts
from fuligo.models.quantized_linear import quantize_base, quantized_weights
from fuligo.models.registry import architecture_of, family_of, names_of
from fuligo.planner.gpus import gpu
from fuligo.planner.layout import make_layout
from fuligo.planner.make_plan import disk_of_checkpoints, make_plan
from fuligo.planner.memory.bars import memory_bars
from fuligo.planner.memory.torch_trainer import adapted_layer_bytes, copied_factor_bytes, torch_trainer_items
from fuligo.planner.plan import MemoryItem
from fuligo.planner.roofline import phases
from fuligo.planner.subject import Subject, read_subject
from tests import tiny, tiny_vision
from tests.unit.planner.test_measured import QWEN3_30B, config_json
from tests.unit.planner.test_torch_trainer import EXPERTS, SHAPE, TOKENS, saved_bytes

FLAGS = "--hf-checkpoint model --prompt-data prompts.jsonl --rm-type random --launcher local --device cuda --train-backend torch \
  --precision bf16 --num-rollout 10 --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096 \
  --rollout-max-prompt-len 512 --use-kl-loss --colocate --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 1e-5"
FAMILIES = [*(family for family in tiny.FAMILIES if family != "kimi_k2"), "gemma4_text"]
SHAPES = {"gemma4_text": tiny.GEMMA4}
TARGETS = [(), ("q_proj", "v_proj"), ("down_proj",), ("self_attn.o_proj",)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_adapter_of_experts_has_the_parameters_of_the_real_model(family: str) -> None:
    model: Any = tiny.model(family)
    config = AdapterConfig(rank=3, alpha=6.0, adapts_experts=True)
    add_adapter(model, config, seed=0)
    shape = AdapterShape(config, architecture_of(model.config.to_dict()))
    assert shape.num_parameters == sum(parameter.numel() for parameter in adapter_tensors(model).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_has_the_matrices_of_the_real_model(family: str) -> None:
    model: Any = tiny.model(family, **SHAPES.get(family, {}))
    config = AdapterConfig(rank=3, alpha=6.0)
    widest = max(max(model.get_submodule(name).weight.shape) for name in linear_layers(model))
    add_adapter(model, config, seed=0)
    found = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter_tensors(model)}
    shape = AdapterShape(config, architecture_of(model.config.to_dict()))
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = [(layer.number, matrix.name) for layer in shape.architecture.layers for matrix in shape.adapted(layer)]
    outside = {f"model.{matrix.name}" for matrix in shape.adapted_outside}
    assert outside == {name for name in found if ".layers." not in name}
    assert sorted(layers) == sorted((int(name.split(".")[2]), name.rpartition(".")[2]) for name in found - outside)
    assert shape.widest == widest


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("targets", [(), ("q_proj",), ("model.language_model.layers.2.self_attn.o_proj",), ("language_model.norm",)])
def test_layers_of_a_model_with_towers_have_the_names_of_the_real_model(family: str, targets: tuple[str, ...]) -> None:
    described: Any = tiny_vision.gemma4_config() if family == "gemma4" else tiny_vision.model_config(family)
    with torch.device("meta"):
        layers = linear_layers(AutoModelForImageTextToText.from_config(described))
    config = AdapterConfig(rank=3, alpha=6.0, target_modules=targets)
    shape = AdapterShape(config, architecture_of(described.to_dict()))
    assert sorted(shape.layers) == sorted(layers)
    planned = sum(len(shape.adapted(layer)) for layer in shape.architecture.layers) + len(shape.adapted_outside)
    assert planned == sum(config.adapts(layer) for layer in layers)


MIXTURES = ["qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]


@pytest.mark.parametrize("family", [*MIXTURES, "minimax_m2", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "gemma4_text"])
def test_a_family_knows_whether_its_experts_are_plain_matrices(family: str) -> None:
    model: Any = tiny.model(family, **SHAPES.get(family, {}))
    found = stacked_experts(model).values()
    assert found
    assert family_of(architecture_of(model.config.to_dict())).has_plain_experts == all(map(has_plain_matrices, found))


@pytest.mark.parametrize(
    ("family", "experts"),
    [*((family, False) for family in ("qwen3", "qwen2", "llama", "glm4", *MIXTURES)), *((family, True) for family in MIXTURES)],
)
def test_an_adapter_has_the_matrices_of_the_megatron_model(family: str, experts: bool) -> None:
    given: Any = tiny.model_config(family)
    config, architecture = AdapterConfig(rank=3, alpha=6.0, adapts_experts=experts), architecture_of(given.to_dict())
    names = AdapterNames.of(names_of(given.to_dict()), config)
    shape = AdapterShape(config, architecture)
    assert shape.num_parameters == sum(math.prod(weight.shape) for weight in names.weights())


@pytest.mark.parametrize("targets", TARGETS)
def test_names_of_targets_select_the_same_matrices_as_in_the_real_model(targets: tuple[str, ...]) -> None:
    model: Any = tiny.model("qwen3")
    config = AdapterConfig(rank=2, alpha=4.0, target_modules=targets)
    add_adapter(model, config, seed=0)
    shape = AdapterShape(config, architecture_of(model.config.to_dict()))
    assert shape.num_parameters == sum(parameter.numel() for parameter in adapter_tensors(model).values())


def test_state_has_the_bytes_of_a_real_training_step() -> None:
    """Weights, gradients that exist after a backward pass, and tensors of AdamW, of a small model in the types of a bf16 run."""
    model: Any = tiny.model("qwen3")
    architecture = architecture_of(model.config.to_dict())
    config = AdapterConfig(rank=4, alpha=8.0)
    add_adapter(model, config, seed=0)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.arange(20)[None]).logits.float().logsumexp(-1).sum().backward()
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]

    planned = items(subject(architecture, config))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert planned["weights"] == size(frozen)
    assert planned["adapter"] == size(trained)
    assert planned["gradients"] == size([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert planned["optimizer"] == size(moments)
    assert "reference" not in planned  # --use-kl-loss: the policy without its adapter


@pytest.mark.parametrize("precision", ["nf4", "8bit"])
@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_moe", "deepseek_v3"])
def test_a_quantized_base_has_the_bytes_of_a_real_one(precision: BasePrecision, family: str) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    model: Any = tiny.model(family, **({"moe_intermediate_size": 64} if family in MIXTURES else {}))
    architecture = architecture_of(model.config.to_dict())
    config = AdapterConfig(rank=4, alpha=8.0)
    add_adapter(model, config, seed=0)
    quantize_base(model, QuantizedBase(precision, "bfloat16"), torch.device("cpu"))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    held = [tensor for layer in quantized_weights(model).values() for tensor in (layer.packed, layer.scales)]
    planned = items(subject(architecture, config, f"--lora-base-precision {precision}"))
    assert planned["weights"] == 2 * sum(parameter.numel() for parameter in frozen) + size(held)
    two = items(subject(architecture, config, f"--lora-base-precision {precision} --actor-num-gpus-per-node 2 --rollout-num-gpus 2"))
    assert two["weights"] > size(held), "every rank holds all of it"
    assert planned["adapter"] == items(subject(architecture, config))["adapter"]


def test_a_quantized_4b_base_saves_five_gibibytes() -> None:
    architecture, config = architecture_of(config_json("qwen3-4b")), AdapterConfig(16, 32.0)
    full, eight, four = (
        sum(items(subject(architecture, config, flags)).values())
        for flags in ("", *map("--lora-base-precision {}".format, ("8bit", "nf4")))
    )
    assert full - eight > 3 * 2**30
    assert full - four > 5 * 2**30


QWEN3, LLAMA, GLM4, GLM4_MOE = (Qwen3Config, 1e-6), (LlamaConfig, 1e-6), (Glm4Config, 0.06), (Glm4MoeConfig, 0.10)
FLOAT32, BFLOAT16 = (torch.float32, 4), (torch.bfloat16, 2)
ALL_LINEAR, ATTENTION = (), ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("make", "tolerance", "dtype", "size_of", "targets"),
    [
        pytest.param(*family, *numbers, targets, marks=[] if chosen else [pytest.mark.slow])  # each pair of two is among the chosen
        for families, numbers, targets, chosen in [
            ((QWEN3, GLM4_MOE), FLOAT32, ALL_LINEAR, True),
            ((LLAMA, GLM4), BFLOAT16, ALL_LINEAR, True),
            ((LLAMA, GLM4), FLOAT32, ATTENTION, True),
            ((QWEN3, GLM4_MOE), BFLOAT16, ATTENTION, True),
            ((LLAMA, GLM4), FLOAT32, ALL_LINEAR, False),
            ((QWEN3, GLM4_MOE), BFLOAT16, ALL_LINEAR, False),
            ((QWEN3, GLM4_MOE), FLOAT32, ATTENTION, False),
            ((LLAMA, GLM4), BFLOAT16, ATTENTION, False),
        ]
        for family in families
    ],
)
def test_a_frozen_layer_keeps_what_autograd_saves(
    make: Any, tolerance: float, dtype: torch.dtype, size_of: int, targets: tuple[str, ...]
) -> None:
    shape = SHAPE | (EXPERTS if make is Glm4MoeConfig else {})
    two, four = (make(num_hidden_layers=count, pad_token_id=0, **shape) for count in (2, 4))
    config = AdapterConfig(rank=8, alpha=16.0, target_modules=targets)
    # GLM's: partly rotated heads have another layout, so that PyTorch's attention on a CPU copies its output for o_proj.
    measured = (saved_bytes(four, dtype, adapter=config) - saved_bytes(two, dtype, adapter=config)) / 2
    adapter = AdapterShape(config, architecture_of(two.to_dict()))
    assert adapted_layer_bytes(adapter.architecture.layers[0], adapter, size_of) * TOKENS == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("dtype, size_of", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_layer_with_adapted_experts_keeps_what_autograd_saves(dtype: torch.dtype, size_of: int) -> None:
    two, four = (Glm4MoeConfig(num_hidden_layers=count, pad_token_id=0, **SHAPE, **EXPERTS) for count in (2, 4))
    config = AdapterConfig(rank=8, alpha=16.0, target_modules=("q_proj",), adapts_experts=True)
    measured = (saved_bytes(four, dtype, adapter=config) - saved_bytes(two, dtype, adapter=config)) / 2
    adapter = AdapterShape(config, architecture_of(two.to_dict()))
    layer = adapter.architecture.layers[0]
    planned = adapted_layer_bytes(layer, adapter, size_of) * TOKENS + copied_factor_bytes(layer, adapter, size_of)
    assert planned == pytest.approx(measured, rel=0.10)


def test_4b_with_an_adapter_needs_less_than_half_of_full_training() -> None:
    architecture = architecture_of(config_json("qwen3-4b"))
    adapter = AdapterConfig(rank=16, alpha=32.0)
    lora, full = (sum(items(subject(architecture, config, "--gradient-checkpointing")).values()) for config in (adapter, None))
    assert lora <= 0.45 * full


def test_a_30b_mixture_with_an_adapter_fits_one_h200() -> None:
    shape = {**QWEN3_30B, "num_hidden_layers": 48}
    planned = subject(architecture_of(shape), AdapterConfig(rank=16, alpha=32.0), "--gradient-checkpointing --rollout-backend sglang")
    trainer = memory_bars(planned, make_layout(planned))[0]
    assert trainer.fits
    without = replace(planned, adapter_config=None)
    assert not memory_bars(without, make_layout(without))[0].fits


@pytest.mark.parametrize("sync, parts", [("adapter", "adapter"), ("merged", "weights")])
def test_a_sync_sends_only_the_adapter_or_all_weights(sync: str, parts: str) -> None:
    architecture = architecture_of(config_json("qwen3-4b"))
    planned = subject(architecture, AdapterConfig(16, 32.0), f"--rollout-backend embedded --lora-sync {sync}")
    (phase,) = [phase for phase in phases(planned, make_layout(planned)) if phase.name == "sync"]
    adapter = planned.adapter
    assert adapter is not None
    num_bytes = 2 * (adapter.num_parameters if parts == "adapter" else architecture.num_parameters)
    assert phase.duration_s == pytest.approx(num_bytes / 12e9)


def test_frozen_weights_save_a_third_of_the_passes() -> None:
    architecture = architecture_of(config_json("qwen3-4b"))
    lora, full = (subject(architecture, config) for config in (AdapterConfig(16, 32.0), None))
    flops = [next(phase.flops for phase in phases(each, make_layout(each)) if phase.name == "train") for each in (lora, full)]
    assert flops[0] == pytest.approx(2 / 3 * flops[1])


def test_a_checkpoint_holds_the_adapter_and_its_moments() -> None:
    architecture = architecture_of(config_json("qwen3-4b"))
    planned = subject(architecture, AdapterConfig(16, 32.0), "--save-hf exports")
    disk, adapter = disk_of_checkpoints(planned), planned.adapter
    assert disk is not None and adapter is not None
    assert (disk.checkpoint_bytes, disk.export_bytes) == (12 * adapter.num_parameters, 4 * adapter.num_parameters)


def test_an_adapter_over_several_ranks_is_sharded() -> None:
    architecture = architecture_of(config_json("qwen3-4b"))
    config = AdapterConfig(16, 32.0)
    four = subject(architecture, config, "--actor-num-gpus-per-node 4 --rollout-num-gpus 4")
    assert items(four)["optimizer"] == 8 * math.ceil(AdapterShape(config, architecture).num_parameters / 4)


def test_the_plan_of_a_run_names_the_adapter(tmp_path: Path) -> None:
    model = tiny.save_checkpoint(tmp_path / "model", hidden=64)
    config = parse([*FLAGS.replace("--hf-checkpoint model", f"--hf-checkpoint {model}").split(), "--lora-rank", "4"]).config
    plan = make_plan(config, "h200-141", "run")
    real: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    add_adapter(real, AdapterConfig(4, 32.0), seed=0)
    assert plan.num_adapter_parameters == sum(parameter.numel() for parameter in adapter_tensors(real).values())
    assert any(item.name == "adapter" for bar in plan.memory for item in bar.items)


def test_an_adapter_that_is_not_here_cannot_be_planned(tmp_path: Path) -> None:
    model = tiny.save_checkpoint(tmp_path / "model", hidden=64)
    flags = FLAGS.replace("--hf-checkpoint model", f"--hf-checkpoint {model}")
    with pytest.raises(ConfigError, match=r"--lora-adapter: cannot read .* plan with --lora-rank"):
        read_subject(parse([*flags.split(), "--lora-adapter", str(tmp_path / "missing")]).config, "h200-141")


def subject(architecture: Any, adapter: AdapterConfig | None, flags: str = "") -> Subject:
    lora = [] if adapter is None else ["--lora-rank", str(adapter.rank)]
    config = parse([*FLAGS.split(), *flags.split(), *lora]).config
    return Subject(config, architecture, architecture, gpu("h200-141"), adapter_config=adapter)


def items(planned: Subject) -> dict[str, int]:
    found: tuple[MemoryItem, ...] = torch_trainer_items(planned)
    return {item.name: item.num_bytes for item in found}


def size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
