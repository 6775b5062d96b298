"""Parameter counts of all families against transformers' models on the meta device."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from fuligo.formats.hugging_face import read_config_json
from fuligo.models.architecture import Architecture, PartKind
from fuligo.models.registry import FAMILIES, architecture_of
from tests import tiny_vision
from tests.unit.models import reference

EXAMPLES = Path(__file__).parents[3] / "examples"

MOE = {
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
DENSE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
TORCH_ONLY = {"gemma4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss", "minimax_m2", "qwen3_vl_text"}
"""Families whose sizes `SMALL` has; they have no names in Megatron."""
SPARSE = {"deepseek_v32", "glm_moe_dsa"}
GLM4 = DENSE | {"pad_token_id": 0}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    "num_kv_shared_layers": 2,
    "head_dim": 20,
    "global_head_dim": 36,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 90,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 44,
}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LINEAR = {
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "shared_expert_intermediate_size": 40,
}
SMALL: list[dict[str, Any]] = [
    DENSE | {"model_type": "llama"},
    DENSE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    DENSE | {"model_type": "mistral", "sliding_window": None},
    DENSE | {"model_type": "mistral", "sliding_window": None, "head_dim": 24, "tie_word_embeddings": True},
    DENSE | {"model_type": "qwen2"},
    DENSE | {"model_type": "qwen3"},
    DENSE | {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    GLM4 | {"model_type": "glm4"},
    GLM4 | {"model_type": "glm4", "attention_bias": False, "head_dim": 16},
    MOE | {"model_type": "qwen3_moe", "num_experts": 6, "num_hidden_layers": 4},
    MOE | {"model_type": "qwen3_moe", "num_experts": 6, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    MOE | {"model_type": "glm4_moe", "n_routed_experts": 6, "num_hidden_layers": 4, "first_k_dense_replace": 2, "attention_bias": True},
    MOE | {"model_type": "glm4_moe", "n_routed_experts": 6, "num_hidden_layers": 2, "use_qk_norm": True, "n_shared_experts": 2},
    MOE | LATENT | {"model_type": "glm4_moe_lite", "n_routed_experts": 6, "num_hidden_layers": 3},
    MOE | LATENT | {"model_type": "glm4_moe_lite", "n_routed_experts": 6, "num_hidden_layers": 3, "q_lora_rank": None},
    MOE | LATENT | {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_hidden_layers": 4},
    MOE
    | LATENT
    | {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_hidden_layers": 2, "first_k_dense_replace": 0, "attention_bias": True},
    MOE | LINEAR | {"model_type": "qwen3_next", "num_experts": 6, "num_hidden_layers": 5},
    MOE | LINEAR | {"model_type": "qwen3_next", "num_experts": 6, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    MOE | LINEAR | {"model_type": "qwen3_5_moe_text", "num_experts": 6, "num_hidden_layers": 2, "full_attention_interval": 2},
    DENSE | LINEAR | {"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    DENSE | {"model_type": "gemma3_text"},
    DENSE | {"model_type": "gemma3_text", "head_dim": 24, "attention_bias": True, "tie_word_embeddings": False},
    DENSE | GEMMA4,
    DENSE | GEMMA4 | {"hidden_size_per_layer_input": 0, "attention_bias": True, "tie_word_embeddings": False, "attention_k_eq_v": False},
    DENSE
    | GEMMA4
    | {"num_hidden_layers": 7, "num_kv_shared_layers": 1, "layer_types": None, "global_head_dim": 24, "enable_moe_block": False},
    DENSE | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24},
    DENSE | {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 1, "attention_bias": False},
    DENSE | {"model_type": "minimax_m2", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24},
    MOE
    | LATENT
    | {
        "model_type": "glm_moe_dsa",
        "n_routed_experts": 8,
        "num_hidden_layers": 4,
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 9,
    },
    MOE
    | LATENT
    | {
        "model_type": "deepseek_v32",
        "n_routed_experts": 8,
        "num_experts": 8,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 9,
    },
]


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config["model_type"])
def test_small_models_have_the_parameters_of_transformers(config: dict[str, Any]) -> None:
    assert_counts_agree(config)


@pytest.mark.parametrize("recipe", ["glm4-9b", "glm4.5-355b", "glm4.7-flash", "glm5.2-744b", "gpt-oss-20b", "qwen3-4b"])
def test_recipes_models_have_the_parameters_of_transformers(recipe: str) -> None:
    assert_counts_agree(read_config_json(EXAMPLES / recipe / "model"))


def test_the_published_deepseek_v32_has_the_parameters_of_transformers() -> None:
    published = {
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    }
    assert_counts_agree(published)
    assert architecture_of(published).num_parameters == pytest.approx(671.9e9, abs=0.05e9)


def test_the_published_minimax_m2_has_229_billion_of_which_11_are_active() -> None:
    published = {
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "shared_intermediate_size": 0,
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
    }
    assert_counts_agree(published)
    found = architecture_of(published)
    assert found.num_parameters == pytest.approx(228.7e9, abs=0.05e9)
    assert found.num_active_parameters == pytest.approx(11.03e9, abs=0.005e9)  # 9.8 in the layers


def multiple(of: int, low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high).map(lambda number: number * of)


@st.composite
def small_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw shapes whose numbers are unlikely to coincide by accident."""
    family = draw(st.sampled_from(sorted(set(FAMILIES) - {"mimo", *TORCH_ONLY})))
    num_kv_heads = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 4))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": draw(multiple(6, 1, 8)) * num_kv_heads,
        "intermediate_size": draw(st.integers(1, 90)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads * draw(st.sampled_from([1, 2, 3])),
        "num_key_value_heads": num_kv_heads,
        "vocab_size": draw(st.integers(2, 99)),
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "tie_word_embeddings": draw(st.booleans()),
        "head_dim": draw(multiple(2, 1, 20)),
        "attention_bias": draw(st.booleans()),
    }
    num_experts = draw(st.integers(1, 5))
    config |= {
        "num_experts" if family == "qwen3_moe" else "n_routed_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "moe_intermediate_size": draw(st.integers(1, 40)),
        "n_shared_experts": draw(st.integers(1, 3)),
        "first_k_dense_replace": 1 if family == "glm4_moe_lite" else draw(st.integers(0, num_layers)),
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": draw(st.booleans()),
        "mlp_bias": family == "llama" and draw(st.booleans()),
    }
    if family in {"deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"}:
        del config["head_dim"]
        may_be_direct = family not in SPARSE
        config |= {key: draw(multiple(2, 1, 12)) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
        config["q_lora_rank"] = draw(st.integers(1, 30) | (st.none() if may_be_direct else st.nothing()))
    if family in SPARSE:
        config |= {"index_n_heads": draw(st.integers(1, 4)), "index_head_dim": draw(multiple(2, 8, 12)), "index_topk": 5}
    if family == "mistral":
        config["sliding_window"] = None
    if family == "deepseek_v32":
        config["num_experts"] = num_experts  # which transformers 5.12.1 reads
    if family == "glm_moe_dsa":
        config |= {"index_topk_freq": draw(st.integers(1, 3)), "index_skip_topk_offset": draw(st.integers(1, 3))}
    return config


@given(small_configs())
def test_any_shape_has_the_parameters_of_transformers(config: dict[str, Any]) -> None:
    assert_counts_agree(config)


def assert_counts_agree(config: dict[str, Any]) -> None:
    """Compare every layer and kind, and the correction biases, which are buffers."""
    architecture, model = architecture_of(config), reference.build(config)
    assert counts_of(architecture) == reference.parameter_counts(model)
    assert architecture.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {layer.number: layer.num_buffer_elements for layer in architecture.layers if layer.num_buffer_elements} == (
        reference.correction_biases(model)
    )


def counts_of(architecture: Architecture) -> reference.Counts:
    counts: Counter[tuple[int | None, PartKind]] = Counter()
    for part in architecture.outer_parts:
        counts[None, part.kind] += part.num_parameters
    for layer in architecture.layers:
        for part in layer.parts:
            counts[layer.number, part.kind] += part.num_parameters
    return dict(counts)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", tiny_vision.LANGUAGE)
def test_a_vision_tower_has_the_parameters_of_transformers(family: str, is_tied: bool) -> None:
    config = tiny_vision.model_config(family, tied=is_tied)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = architecture_of(config.to_dict())
    assert found.vision_tower is not None
    assert found.vision_tower.num_parameters == sum(weight.numel() for weight in model.model.visual.parameters())
    assert found.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_the_published_qwen3_vl_4b_has_4_44_billion() -> None:
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    found = architecture_of({"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text, "vision_config": vision})
    assert found.num_parameters == pytest.approx(4.44e9, abs=0.005e9)
