"""Shapes of Gemma 4 against transformers' models of the published sizes, and what the plan makes of them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fuligo.engines.embedded.model import EngineModel
from fuligo.errors import ConfigError
from fuligo.layout.flops import forward_flops
from fuligo.models.architecture import GroupedAttention
from fuligo.models.registry import architecture_of, family_of
from fuligo.planner.memory.engine import cached_elements_per_token
from tests import tiny, tiny_vision

SHARED = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "final_logit_softcapping": 30.0,
}
SMALL_TOWERS = {"vision_config": {"use_clipped_linears": True}, "audio_config": {}}
LARGE_TOWER = {
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "standardize": True,
    },
    "audio_config": None,
}


def kinds(num_layers: int, every: int) -> list[str]:
    return ["sliding_attention" if (number + 1) % every else "full_attention" for number in range(num_layers)]


E2B = SHARED | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": kinds(35, 5),
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
}
E4B = SHARED | {
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 42,
    "layer_types": kinds(42, 6),
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
}
A4B = SHARED | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "num_hidden_layers": 30,
    "layer_types": kinds(30, 6),
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
}
DENSE_31B = A4B | {
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "enable_moe_block": False,
    "num_hidden_layers": 60,
    "layer_types": kinds(60, 6),
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
}
PUBLISHED = {"E2B": (E2B, SMALL_TOWERS), "E4B": (E4B, SMALL_TOWERS), "26B-A4B": (A4B, LARGE_TOWER), "31B": (DENSE_31B, LARGE_TOWER)}


@pytest.mark.parametrize(
    ("name", "text", "whole"),
    [
        ("E2B", 4_628_569_344, 5_104_297_504),
        ("E4B", 7_463_013_376, 7_941_100_832),
        ("26B-A4B", 25_233_141_760, 25_805_933_872),
        ("31B", 30_697_345_280, 31_273_086_512),
    ],
)
def test_published_sizes_have_the_parameters_of_transformers(name: str, text: int, whole: int) -> None:
    config, towers = PUBLISHED[name]
    described = AutoConfig.for_model("gemma4", text_config=copy.deepcopy(config), **towers)
    with torch.device("meta"):
        alone: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
        model: Any = AutoModelForImageTextToText.from_config(described)
    assert architecture_of(config).num_parameters == alone.num_parameters() == text
    found = architecture_of(described.to_dict())
    assert found.num_parameters == model.num_parameters() == whole
    assert found.vision_tower is not None and found.vision_tower.num_parameters == whole - text
    assert not family_of(found).sees_images


def test_a_token_of_the_mixture_uses_its_dense_mlp_and_8_of_128_experts() -> None:
    """3.8 billion, as published."""
    found = architecture_of(A4B)
    assert found.num_parameters - found.num_active_parameters == 30 * 120 * 3 * 2816 * 704
    assert found.num_active_parameters == 3_822_530_560


def test_layers_that_share_keys_cache_none() -> None:
    """E2B: 15 layers have keys and values of their own, three of them with heads of 512."""
    found = architecture_of(E2B)
    kept = [found.attention_of(layer).kv_elements_per_token for layer in found.layers]
    assert kept == [2 * 256, 2 * 256, 2 * 256, 2 * 256, 2 * 512] * 3 + [0] * 20
    assert [layer.window for layer in found.layers[:5]] == [512, 512, 512, 512, None]
    # Both engines reserve them nevertheless; rows of the embedded one are as wide as the widest.
    assert cached_elements_per_token(found) == 35 * 2 * 512


@pytest.mark.parametrize("changes", [{}, {"num_kv_shared_layers": 0, "attention_k_eq_v": False}])
def test_the_embedded_engine_caches_what_the_plan_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = tiny.save_checkpoint(tmp_path, "gemma4_text", **{**tiny.GEMMA4, **changes})
    config: Any = tiny.model_config("gemma4_text", **{**tiny.GEMMA4, **changes})
    engine: Any = EngineModel(str(checkpoint), torch.device("cpu"), torch.float32)
    elements = engine.cache_shape.bytes_per_token(torch.float32) // 4
    assert elements == cached_elements_per_token(architecture_of(config.to_dict()))


@pytest.mark.parametrize("changes", [{"enable_moe_block": False}, {"enable_moe_block": False, "use_double_wide_mlp": True}])
def test_flops_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    """Transformers computes scores of all pairs, also beyond windows and of later tokens: twice the causal pairs."""
    length = 32
    shape = {**tiny.GEMMA4, **changes}
    model: Any = tiny.model("gemma4_text", attn_implementation="eager", **shape)
    flops = forward_flops(architecture_of(model.config.to_dict()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None] + 5)
    pairs = length * length
    expected = flops.per_token * length + flops.per_logit * length + (flops.per_pair + flops.per_window_pair) * pairs
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.002)


def test_towers_of_a_tiny_model_have_the_parameters_of_transformers() -> None:
    config: Any = tiny_vision.gemma4_config()
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    assert architecture_of(config.to_dict()).num_parameters == model.num_parameters()


def test_heads_of_layers_are_told_apart() -> None:
    windowed, full = architecture_of(DENSE_31B).grouped_attentions
    assert windowed == replace(full, head_dim=256, num_kv_heads=16, has_value_projection=True)
    assert isinstance(full, GroupedAttention) and (full.head_dim, full.num_kv_heads) == (512, 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_bidirectional_attention": "all"}, "only causal models"),
        ({"num_global_key_value_heads": None}, "no num_global_key_value_heads"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"num_kv_shared_layers": 4}, "no full_attention layer before the last 4 has keys and values to share"),
        ({"num_kv_shared_layers": 5}, r"num_kv_shared_layers is 5; it must be less than num_hidden_layers \(5\)"),
        ({"top_k_experts": 9}, "top_k_experts 9 exceeds num_experts 8"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], problem: str) -> None:
    config: Any = tiny.model_config("gemma4_text", **tiny.GEMMA4)
    with pytest.raises(ConfigError, match=problem):
        architecture_of(config.to_dict() | changes)
