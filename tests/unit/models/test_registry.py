"""Required keys of config.json; every error names the key."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import language_part, read_config_json
from fuligo.models.megatron_flags import megatron_flags
from fuligo.models.registry import FAMILIES, architecture_of, read_architecture, unwritten_keys
from fuligo.models.transformers_types import read_config
from tests.cluster_recipes import CLUSTER_RECIPES

EXAMPLES = Path(__file__).parents[3] / "examples"
QWEN3 = read_config_json(EXAMPLES / "qwen3-4b" / "model")
GLM_4_5 = read_config_json(EXAMPLES / "glm4.5-355b" / "model")
GLM_5_2 = read_config_json(EXAMPLES / "glm5.2-744b" / "model")
FLASH = read_config_json(EXAMPLES / "glm4.7-flash" / "model")


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((QWEN3, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")),
        *((QWEN3, key) for key in ("vocab_size", "max_position_embeddings")),
        *((GLM_4_5, key) for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")),
        *((FLASH, key) for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        *((GLM_5_2, key) for key in ("index_n_heads", "index_head_dim", "index_topk")),
    ],
)
def test_a_missing_key_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json has no {key}, which a {config['model_type']} model needs"):
        architecture_of(without(config, key))


@pytest.mark.parametrize(
    ("config", "changed", "text"),
    [
        (QWEN3, {"hidden_size": "2560"}, "hidden_size is '2560'; it must be a positive integer"),
        (QWEN3, {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive integer"),
        (QWEN3, {"vocab_size": True}, "vocab_size is True; it must be a positive integer"),
        (QWEN3, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        (QWEN3, {"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        (GLM_4_5, {"head_dim": None}, "no head_dim, and num_attention_heads 96 does not divide hidden_size 5120"),
        (GLM_4_5, {"num_experts_per_tok": 161}, "num_experts_per_tok 161 exceeds n_routed_experts 160"),
        (GLM_4_5, {"n_group": 7}, "n_group 7 does not divide n_routed_experts 160"),
        (GLM_4_5, {"topk_group": 2}, "topk_group 2 exceeds n_group 1"),
        (GLM_4_5, {"first_k_dense_replace": 93}, "first_k_dense_replace 93 exceeds num_hidden_layers 92"),
        (GLM_4_5, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (GLM_4_5, {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        (FLASH, {"first_k_dense_replace": 2}, "first_k_dense_replace 2 needs mlp_layer_types"),
        (GLM_5_2, {"qk_head_dim": 192}, "qk_head_dim 192 is not qk_nope_head_dim \\+ qk_rope_head_dim = 256"),
        (GLM_5_2, {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, but mlp_layer_types has 3 dense layers"),
        (GLM_5_2, {"num_hidden_layers": 77}, "mlp_layer_types must be a list of 77 words \\(num_hidden_layers\\) of dense | sparse"),
        (GLM_5_2, {"index_topk_freq": 3}, "indexer_types does not agree with index_topk_freq 3 and index_skip_topk_offset 3"),
        (GLM_5_2, {"indexer_types": None, "index_topk_pattern": "S" + "F" * 77}, "the first layer must compute its token choice"),
        (GLM_5_2, {"index_topk_pattern": "FS"}, "index_topk_pattern must be 78 letters"),
        (GLM_5_2, {"q_lora_rank": None}, "sparse attention needs q_lora_rank"),
    ],
)
def test_a_wrong_or_contradictory_key_is_named(config: dict[str, Any], changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        architecture_of(config | changed)


def test_computing_layers_follow_a_pattern_or_a_schedule() -> None:
    pattern = "FFSFSS"
    small = GLM_5_2 | {"num_hidden_layers": 6, "mlp_layer_types": None, "indexer_types": None, "index_topk_freq": None}
    by_pattern = architecture_of(small | {"index_topk_pattern": pattern})
    assert "".join("F" if layer.computes_index else "S" for layer in by_pattern.layers) == pattern
    assert all(layer.computes_index for layer in architecture_of(small).layers)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model_type gpt2 is not supported; use a model of one of the types deepseek_v3, deepseek_v32, gemma3_text, gemma4_text, .*",
    ):
        architecture_of({"model_type": "gpt2"})
    assert len(FAMILIES) == 21


def test_nemotron_h_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"model_type nemotron_h is not supported: .*from one packed sample to the next"):
        architecture_of({"model_type": "nemotron_h"})


def test_the_language_model_of_a_multi_modal_one_is_read() -> None:
    assert architecture_of({"model_type": "something_with_pictures", "text_config": QWEN3}).num_parameters == 4_022_468_096


def test_transformers_5_calls_the_experts_of_qwen3_otherwise() -> None:
    mixture = QWEN3 | {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert architecture_of(mixture | {"num_local_experts": 8}) == architecture_of(mixture | {"num_experts": 8})


@pytest.mark.parametrize(
    ("content", "text"), [("{", "is not valid JSON"), ("[]", "is not a JSON object"), ("{}", "has no model_type"), (None, "does not exist")]
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str | None, text: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"{file}.*{text}"):
        read_architecture(file)


def test_a_directory_stands_for_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_architecture(tmp_path) == read_architecture(tmp_path / "config.json") == architecture_of(QWEN3)


@pytest.mark.parametrize("value", [None, True, 0, -1, 2.5, float("nan"), "x", [], [1], {}, {"a": 1}])
@pytest.mark.parametrize("config", [QWEN3, GLM_4_5, FLASH, GLM_5_2], ids=lambda config: config["model_type"])
def test_any_value_of_any_key_is_read_or_refused(config: dict[str, Any], value: object) -> None:
    for key in (*config, "rope_parameters", "text_config", "num_nextn_predict_layers"):
        with contextlib.suppress(ConfigError):
            architecture_of(config | {key: value})
        with contextlib.suppress(ConfigError):
            megatron_flags(config | {key: value})


def test_gemma_3_has_windows_but_in_every_sixth_layer_and_ties_its_embeddings() -> None:
    """google/gemma-3-1b-it, whose config.json names neither the layers' types nor tied embeddings."""
    config = {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "head_dim": 256}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144, "max_position_embeddings": 32768}
    model = architecture_of(config | {"sliding_window": 512, "sliding_window_pattern": 6})
    assert [layer.number for layer in model.layers if layer.window is None] == [5, 11, 17, 23]
    assert {layer.window for layer in model.layers} == {None, 512}
    assert model.tied_embeddings and model.num_parameters == 999_885_952


def test_what_transformers_leaves_out_of_a_published_config_json_is_known(tmp_path: Path) -> None:
    """Rotary settings, which it writes under other names, aside."""
    renamed = {"rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"}
    for file in {path.parent / "model/config.json" for path in CLUSTER_RECIPES}:
        published = json.loads(file.read_text())
        if published["model_type"] == "mimo":  # transformers does not know it
            continue
        read_config(file.parent).save_pretrained(tmp_path)
        given, written = (language_part(each) for each in (published, json.loads((tmp_path / "config.json").read_text())))
        assert given.keys() - written.keys() - renamed == unwritten_keys(published).keys() - written.keys(), file


def test_model_args_mean_the_oldest_of_the_families_with_their_flags() -> None:
    """Others reuse its `FAMILY`, and so its flags; a family that is listed before it would be meant in its place."""
    meant: dict[str, str] = {}
    for name, family in FAMILIES.items():
        if family.model_args.identified_by is not None:
            meant.setdefault(str((family.model_args.identified_by, family.model_args.precedence)), name)
    assert set(meant.values()) == {"llama", "qwen2", "qwen3", "glm4", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm_moe_dsa"}
    precedences = [FAMILIES[name].model_args.precedence for name in meant.values()]
    assert len(set(precedences)) == len(precedences)
