"""Activations of the torch trainer against tensors saved by autograd in its own models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen3Config,
)

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.layout.adapter import AdapterShape
from fuligo.models.adapter import add_adapter
from fuligo.models.modules import speed_up_rms_norms
from fuligo.models.registry import architecture_of
from fuligo.planner.memory.torch_trainer import adapted_layer_bytes, compiled_layer_bytes, compiles_layers, layer_bytes, torch_trainer_items
from fuligo.trainer.torch_backend.compiled_layers import can_compile
from fuligo.trainer.torch_backend.packed_attention import PACKED_ATTENTION, register
from tests import tiny, tiny_vision
from tests.unit.planner.subjects import subject_of

TOKENS = 128
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}


def saved_bytes(config: Any, dtype: torch.dtype, *, compiled: bool = False, adapter: AdapterConfig | None = None) -> int:
    """Return the bytes that a forward pass over packed tokens saves for the backward pass.

    `compiled` layers run the graphs that `torch.compile` partitions on GPUs, without its kernels. An `adapter` is trained in place of the
    weights.
    """
    register()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    speed_up_rms_norms(model)
    if adapter is not None:
        add_adapter(model, adapter, seed=0)
    model = model.to(dtype)
    for layer in model.base_model.layers if compiled else ():
        layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition")
    ours = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.base_model(
            input_ids=torch.arange(TOKENS)[None] % 64,
            position_ids=torch.arange(TOKENS)[None],
            packed_cu_seqlens=(0, TOKENS),
            use_cache=False,
        )
    assert output is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("make, tolerance", [(Qwen3Config, 0.01), (Glm4MoeConfig, 0.07)])
def test_a_layer_keeps_what_autograd_saves(make: Any, tolerance: float, dtype: torch.dtype, size: int) -> None:
    shape = SHAPE | (EXPERTS if make is Glm4MoeConfig else {})
    two, four = (make(num_hidden_layers=count, **shape) for count in (2, 4))
    measured = (saved_bytes(four, dtype) - saved_bytes(two, dtype)) / 2
    architecture = architecture_of(two.to_dict())
    assert layer_bytes(architecture.layers[0], architecture, size) * TOKENS == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=8, alpha=16.0)], ids=["weights", "adapter"])
@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("num_borrowing", [0, 2])
def test_layers_of_different_shapes_keep_what_autograd_saves(
    num_borrowing: int, dtype: torch.dtype, size: int, adapter: AdapterConfig | None
) -> None:
    """Gemma 4: a layer with a window, and a full one with larger heads; both may take keys and values of earlier ones."""
    sizes = {"global_head_dim": 128, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 64, "use_double_wide_mlp": True}
    two, four = (
        Gemma4TextConfig(
            num_hidden_layers=count,
            layer_types=["sliding_attention", "full_attention"] * (count // 2),
            num_kv_shared_layers=num_borrowing if count == 4 else 0,
            **SHAPE,
            **sizes,
        )
        for count in (2, 4)
    )
    measured = saved_bytes(four, dtype, adapter=adapter) - saved_bytes(two, dtype, adapter=adapter)
    architecture = architecture_of(four.to_dict())
    last = architecture.layers[2:]
    if adapter is None:
        planned = sum(layer_bytes(layer, architecture, size) for layer in last)
    else:
        planned = sum(adapted_layer_bytes(layer, AdapterShape(adapter, architecture), size) for layer in last)
    assert planned * TOKENS == pytest.approx(measured, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [pytest.param(LlamaConfig, marks=pytest.mark.slow), Qwen3Config, Glm4Config]
)  # Qwen3 adds only norms of queries and keys
def test_a_compiled_layer_keeps_what_autograd_saves(make: Any) -> None:
    one, two = (make(num_hidden_layers=count, pad_token_id=0, **SHAPE) for count in (1, 2))
    measured = saved_bytes(two, torch.bfloat16, compiled=True) - saved_bytes(one, torch.bfloat16, compiled=True)
    architecture = architecture_of(one.to_dict())
    assert compiled_layer_bytes(architecture.layers[0], architecture) * TOKENS == pytest.approx(measured, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("make", [Qwen3Config, pytest.param(Glm4Config, marks=pytest.mark.slow)])  # the test above has its layers
def test_a_compiled_layer_keeps_the_outputs_of_a_too(make: Any) -> None:
    one, two = (make(num_hidden_layers=count, pad_token_id=0, **SHAPE) for count in (1, 2))
    adapter = AdapterShape(AdapterConfig(rank=8, alpha=16.0), architecture_of(one.to_dict()))
    measured, fewer = (saved_bytes(config, torch.bfloat16, compiled=True, adapter=adapter.config) for config in (two, one))
    planned = compiled_layer_bytes(adapter.architecture.layers[0], adapter.architecture, adapter) * TOKENS
    assert planned == pytest.approx(measured - fewer, rel=0.001)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny_vision.LANGUAGE])
def test_the_plan_expects_compiled_layers_where_the_trainer_compiles(family: str) -> None:
    has_tower = family in tiny_vision.LANGUAGE
    config = tiny_vision.model_config(family) if has_tower else tiny.model_config(family)
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_config(config)
    subject = subject_of("--train-backend torch --precision bf16", "qwen3-4b")
    assert compiles_layers(replace(subject, architecture=architecture_of(config.to_dict()))) is can_compile(model)


@pytest.mark.parametrize(
    ("model", "flags", "named"),
    [
        ("qwen3-next-80b", "--mtp-num-layers 1", "the frozen MTP layer among them"),
        ("qwen3.5-35b", "", "the frozen vision tower among them"),
        ("qwen3.5-35b", "--mtp-num-layers 1", "the frozen vision tower and MTP layer among them"),
    ],
)
def test_frozen_parts_of_the_weights_are_named(model: str, flags: str, named: str) -> None:
    subject = subject_of(f"--train-backend torch --actor-num-gpus-per-node 8 {flags}", model)
    [note] = [item.note for item in torch_trainer_items(subject) if item.name == "weights"]
    assert note.endswith(f"fp32, {named}")


def test_a_loaded_mtp_layer_is_counted_where_it_is() -> None:
    flags = "--train-backend torch --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --use-kl-loss"
    flags += " --kl-loss-coef 0.1"
    without, frozen, trained = (
        {item.name: item.num_bytes for item in torch_trainer_items(subject_of(f"{flags} {further}", "qwen3.5-35b"))}
        for further in ("", "--mtp-num-layers 1", "--mtp-num-layers 1 --enable-mtp-training")
    )
    share = subject_of(flags, "qwen3.5-35b").architecture.num_mtp_parameters / 8
    assert frozen["weights"] - without["weights"] == pytest.approx(4 * share)
    assert trained["weights"] == frozen["weights"]
    assert {name: size for name, size in frozen.items() if name != "weights"} == {
        name: size for name, size in without.items() if name != "weights"
    }
    assert trained["optimizer"] - frozen["optimizer"] == pytest.approx(8 * share)
    assert trained["gradients"] - frozen["gradients"] == pytest.approx(4 * share)
    assert trained["activations"] > frozen["activations"] and trained["logits"] > frozen["logits"]
    assert trained["reference"] == without["reference"]
