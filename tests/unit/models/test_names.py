"""Names and shapes of all weights against transformers' models or, where it has none, against published files."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fuligo.formats.hugging_face import read_config_json
from fuligo.models.names import ModelNames, with_expert
from fuligo.models.registry import names_of
from tests.unit.models import reference
from tests.unit.models.test_architecture import small_configs

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPES = ["glm4-9b", "glm4.5-355b", "glm4.7-flash", "glm5.2-744b", "qwen3-4b", "mimo-7b"]


def is_published(config: dict[str, Any]) -> bool:
    """Draw more than one expert and unit, since transformers omits sizes and numbers of 1."""
    sizes = [config[key] for key in ("num_experts", "n_routed_experts", "moe_intermediate_size") if key in config]
    return min(sizes) > 1


def known_to_megatron(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the biases that Megatron has no flag for."""
    return config | {"mlp_bias": False, "attention_bias": config["attention_bias"] and config["model_type"] in {"glm4", "glm4_moe"}}


def names_of_recipe(recipe: str) -> ModelNames:
    return names_of(read_config_json(EXAMPLES / recipe / "model"))


@given(small_configs().filter(is_published).map(known_to_megatron))
def test_every_tensor_that_transformers_saves_is_there_once_with_its_shape(config: dict[str, Any]) -> None:
    names, model = names_of(config), reference.build(config)
    assert isinstance(model, PreTrainedModel)
    saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    if config["tie_word_embeddings"]:
        del saved["lm_head.weight"]
    ours = [
        (name, shape) for weight in names.weights(0) for name, shape in zip(weight.checkpoint, names.checkpoint_shapes(weight), strict=True)
    ]
    assert Counter(ours) == Counter(saved.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_each_layer_add_up_to_its_parameters(recipe: str) -> None:
    names = names_of_recipe(recipe)
    sizes: Counter[str] = Counter()
    for weight in names.weights():
        sizes[".".join(weight.megatron.split(".")[:3])] += prod(weight.shape)
    layers = {f"decoder.layers.{layer.number}": layer for layer in names.architecture.layers}
    layers |= {f"mtp.layers.{number}": layer for number, layer in enumerate(names.architecture.mtp_layers)}
    for prefix, layer in layers.items():
        assert sizes.pop(prefix) == layer.num_parameters + layer.num_buffer_elements
    assert sizes.total() == sum(part.num_parameters for part in names.architecture.outer_parts)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_sides_of_a_name_are_unique(recipe: str) -> None:
    weights = list(names_of_recipe(recipe).weights())
    assert len({weight.megatron for weight in weights}) == len(weights)
    assert max(Counter(name for weight in weights for name in weight.checkpoint).values()) == 1


def test_prediction_layers_follow_the_others_in_the_published_files() -> None:
    """zai-org/GLM-4.5, model.safetensors.index.json: layer 92, with copies of embedding and head."""
    names = names_of_recipe("glm4.5-355b")
    prefix = "model.layers.92."
    published = {name for weight in names.weights() for name in weight.checkpoint if name.startswith(prefix)}
    assert {name.removeprefix(prefix) for name in published if ".mlp.experts." not in name} == {
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "mlp.gate.e_score_correction_bias", "mlp.gate.weight",
        "mlp.shared_experts.down_proj.weight", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
        "self_attn.k_norm.weight", "self_attn.k_proj.bias", "self_attn.k_proj.weight", "self_attn.o_proj.weight",
        "self_attn.q_norm.weight", "self_attn.q_proj.bias", "self_attn.q_proj.weight", "self_attn.v_proj.bias", "self_attn.v_proj.weight",
    }  # fmt: skip
    assert names.is_superfluous(prefix + "embed_tokens.weight", 1)
    assert names.is_superfluous(prefix + "shared_head.head.weight", 1)
    assert not names.is_superfluous(prefix + "eh_proj.weight", 1)
    assert names.is_superfluous(prefix + "eh_proj.weight", 0)


def test_prediction_layers_of_mimo_are_counted_on_their_own() -> None:
    """XiaomiMiMo/MiMo-7B-RL, model.safetensors.index.json."""
    names = names_of_recipe("mimo-7b")
    found = {weight.megatron: weight.checkpoint for weight in names.weights() if weight.megatron.startswith("mtp.")}
    assert found["mtp.layers.0.enorm.weight"] == ("model.mtp_layers.0.token_layernorm.weight",)
    assert found["mtp.layers.0.hnorm.weight"] == ("model.mtp_layers.0.hidden_layernorm.weight",)
    assert found["mtp.layers.0.eh_proj.weight"] == ("model.mtp_layers.0.input_proj.weight",)
    assert found["mtp.layers.0.final_layernorm.weight"] == ("model.mtp_layers.0.final_layernorm.weight",)
    assert found["mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"] == ("model.mtp_layers.0.mlp.down_proj.weight",)


def test_a_tied_embedding_stands_under_both_names() -> None:
    config = read_config_json(EXAMPLES / "qwen3-4b" / "model")
    names = names_of(config | {"tie_word_embeddings": True})
    assert names.by_megatron_name["output_layer.weight"].checkpoint == ("model.embed_tokens.weight",)
    assert names.is_superfluous("lm_head.weight", 0)
    assert not names_of(config | {"tie_word_embeddings": False}).is_superfluous("lm_head.weight", 0)


@given(st.integers(0, 300), st.integers(0, 300))
def test_another_expert_changes_nothing_but_its_number(expert: int, other: int) -> None:
    name = "decoder.layers.7.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert with_expert(name.format(expert), other) == name.format(other)


def test_only_layers_that_compute_their_token_choice_have_an_indexer() -> None:
    """The MTP layer, number 78, has one too."""
    names = names_of_recipe("glm5.2-744b")
    found = [name for weight in names.weights() for name in weight.checkpoint if ".indexer." in name]
    assert {int(name.split(".")[2]) for name in found} == {0, 1, 2, *range(6, 75, 4), 78}
    assert {name.split(".indexer.")[1] for name in found} == {
        "wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight",
    }  # fmt: skip
    prediction = names.by_megatron_name["mtp.layers.0.transformer_layer.self_attention.core_attention.indexer.linear_wk.weight"]
    assert prediction.checkpoint == ("model.layers.78.self_attn.indexer.wk.weight",)


def test_the_guide_shows_the_code_as_it_is() -> None:
    root = Path(__file__).parents[3]
    assert (root / "fuligo/models/families/glm4.py").read_text() in (root / "docs/add-a-model.md").read_text()
