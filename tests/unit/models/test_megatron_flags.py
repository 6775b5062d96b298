"""MODEL_ARGS: written from config.json, compared with it, and read without one."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.placement import MegatronArguments
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.from_flags import architecture_from_flags
from fuligo.models.megatron_flags import disagreements, megatron_flags
from fuligo.models.registry import architecture_of, names_of
from fuligo.models.stated_flags import stated_flags
from tests import tiny
from tests.unit.models.test_architecture import LINEAR, MOE

ROOT = Path(__file__).parents[3]
SCRIPTS = {
    "glm4-9B": "glm4-9b",
    "glm4.5-355B-A32B": "glm4.5-355b",
    "glm4.7-30B-A3B": "glm4.7-flash",
    "glm5.2-744B-A40B": "glm5.2-744b",
    "qwen3-4B": "qwen3-4b",
    "mimo-7B-rl": "mimo-7b",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
LLAMA_3 = {"high_freq_factor": 4, "original_max_position_embeddings": 8192}
PUBLIC_GLM4_9B = """
    --spec slime_plugins.models.glm4 get_glm_spec --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32
    --group-query-attention --num-query-groups 2 --vocab-size 151552 --untie-embeddings-and-output-weights --normalization RMSNorm
    --norm-epsilon 1e-5 --post-self-attn-layernorm --post-mlp-layernorm --swiglu --disable-bias-linear --add-qkv-bias
    --use-rotary-position-embeddings --rotary-base 10000 --rotary-percent 0.5 --rotary-interleaved --no-rope-fusion
"""
PUBLIC_FLASH = """
    --num-layers 47 --hidden-size 2048 --ffn-hidden-size 10240 --num-attention-heads 20 --multi-latent-attention --q-lora-rank 768
    --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256 --kv-channels 192 --qk-layernorm --add-qkv-bias
    --position-embedding-type rope --no-position-embedding --rotary-base 1000000 --no-rope-fusion --vocab-size 154880
    --make-vocab-size-divisible-by 64 --untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear
    --num-experts 64 --moe-layer-freq [0]*1+[1]*46 --moe-router-topk 4 --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536 --moe-router-score-function sigmoid --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 1.8
"""
"""MODEL_ARGS of public scripts for these models, including flags that ours leave out."""


def model(recipe: str) -> dict[str, Any]:
    return read_config_json(ROOT / "examples" / recipe / "model")


def given(text: str) -> Config:
    return parse(shlex.split(text)).config


def words(flags: dict[str, Any]) -> list[str]:
    """Format flags as they are typed."""
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_say_what_config_json_says(name: str) -> None:
    printed = subprocess.run(
        ["bash", "-euc", f'source scripts/models/{name}.sh; printf "%s\\n" "${{MODEL_ARGS[@]}}"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")[:-1]
    assert printed == words(megatron_flags(model(SCRIPTS[name])))


@pytest.mark.parametrize("recipe", SCRIPTS.values())
def test_made_flags_parse_and_agree(recipe: str) -> None:
    flags = megatron_flags(model(recipe))
    config = parse(words(flags)).config
    assert config.megatron == MegatronArguments({name: value for name, value in flags.items() if name != "allgather_cp"})
    assert config.parallel.allgather_cp == ("allgather_cp" in flags)
    assert list(disagreements(config, model(recipe))) == []


@pytest.mark.parametrize(("text", "recipe"), [(PUBLIC_GLM4_9B, "glm4-9b"), (PUBLIC_FLASH, "glm4.7-flash")])
def test_public_flags_agree(text: str, recipe: str) -> None:
    assert list(disagreements(given(text), model(recipe))) == []


@pytest.mark.parametrize(
    ("recipe", "text", "found"),
    [
        ("glm4-9b", "--rotary-base 1000000", ("--rotary-base", 1_000_000, 10_000)),
        ("glm4-9b", "--num-layers 41", ("--num-layers", 41, 40)),
        ("glm4-9b", "--qk-layernorm", ("--qk-layernorm", True, False)),
        ("glm4-9b", "--num-experts 8", ("--num-experts", 8, None)),
        ("glm4-9b", "--norm-epsilon 1e-6", ("--norm-epsilon", 1e-6, 1e-5)),
        ("qwen3-4b", "--untie-embeddings-and-output-weights", ("--untie-embeddings-and-output-weights", True, False)),
        ("qwen3-4b", "--rotary-percent 0.5", ("--rotary-percent", 0.5, 1.0)),
        ("qwen3-4b", "--kv-channels 80", ("--kv-channels", 80, 128)),
        ("glm4.5-355b", "--moe-layer-freq [0]*2+[1]*90", ("--moe-layer-freq", [0] * 2 + [1] * 90, [0] * 3 + [1] * 89)),
        ("glm4.5-355b", "--moe-layer-freq 1", ("--moe-layer-freq", 1, [0] * 3 + [1] * 89)),
        ("glm4.5-355b", "--moe-router-score-function softmax", ("--moe-router-score-function", "softmax", "sigmoid")),
        ("glm5.2-744b", "--dsa-indexer-topk 1024", ("--dsa-indexer-topk", 1024, 2048)),
        ("glm5.2-744b", "--spec slime_plugins.models.glm4 get_glm_spec", ("--spec", "slime_plugins.models.glm4 get_glm_spec", None)),
        ("glm5.2-744b", "--spec my.module my_function", ("--spec", "my.module my_function", None)),
        ("glm4.7-flash", "--rope-type yarn", ("--rope-type", "yarn", "rope")),
    ],
)
def test_a_disagreement_shows_both_values(recipe: str, text: str, found: tuple[str, object, object]) -> None:
    assert list(disagreements(given(text), model(recipe))) == [found]


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("glm4-9b", "--rotary-base 10000.0"),
        ("glm4-9b", "--max-position-embeddings 131072"),
        ("glm4-9b", "--attention-dropout 0 --hidden-dropout 0 --moe-grouped-gemm"),
        ("qwen3-4b", "--rotary-percent 1.0"),
        ("glm4.5-355b", "--moe-router-num-groups 1 --moe-router-group-topk 1"),
        ("glm5.2-744b", "--spec slime_plugins.models.glm5.glm5 get_glm5_spec"),
        ("glm5.2-744b", "--spec slime_plugins.models.glm5.glm5.get_glm5_spec"),
        ("glm5.2-744b", "--rotary-scaling-factor 1.0"),
    ],
)
def test_equivalent_flags_do_not_disagree(recipe: str, text: str) -> None:
    assert list(disagreements(given(text), model(recipe))) == []


def test_yarn_and_expert_groups_of_deepseek_v3() -> None:
    flags = megatron_flags(DEEPSEEK_V3)
    expected = {
        "rope_type": "yarn",
        "rotary_scaling_factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_layer_freq": "[0]*3+[1]*58",
    }
    assert flags.items() >= expected.items()
    assert list(disagreements(given("--rotary-scaling-factor 1.0"), DEEPSEEK_V3)) == [("--rotary-scaling-factor", 1.0, 40.0)]


def test_a_frequency_of_windows_counts_layers_without_one() -> None:
    """As Megatron reads it: of 6, every sixth layer has no window; of 1, all layers have none."""
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    gemma = tiny.model_config("gemma3_text", layers=12, layer_types=kinds, sliding_window=5).to_dict()
    assert list(disagreements(given("--window-attn-skip-freq 6"), gemma)) == []
    assert [option for option, *_ in disagreements(given("--window-attn-skip-freq 1"), gemma)] == ["--window-attn-skip-freq"]


@pytest.mark.parametrize(
    ("recipe", "changed", "text"),
    [
        ("qwen3-4b", {"attention_bias": True}, "Megatron has no flags for the biases of this qwen3"),
        (
            "qwen3-4b",
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            r"Megatron has no flags for the rotary scaling of this qwen3 model \(yarn\)",
        ),
        (
            "qwen3-4b",
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 2, **LLAMA_3}},
            r"Megatron has no flags for the rotary scaling of this qwen3 model \(llama3\)",
        ),
        ("glm5.2-744b", {"attention_bias": True}, "Megatron's latent attention has no biases"),
        ("glm4.5-355b", {"norm_topk_prob": False}, "Megatron always normalizes"),
    ],
)
def test_what_megatron_has_no_flag_for_is_refused(recipe: str, changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        megatron_flags(model(recipe) | changed)


@pytest.mark.parametrize("recipe", sorted(set(SCRIPTS.values()) - {"glm5.2-744b"}))
def test_flags_alone_describe_the_same_shapes(recipe: str) -> None:
    """Compare all but the MTP layers, which no flag states."""
    expected = architecture_of(model(recipe))
    read = architecture_from_flags(given(shlex.join(words(megatron_flags(model(recipe))))))
    assert read is not None
    assert (read.layers, read.outer_parts, read.attention, read.experts) == (
        expected.layers,
        expected.outer_parts,
        expected.attention,
        expected.experts,
    )


def test_flags_alone_describe_experts_in_some_layers() -> None:
    mixture = model("qwen3-4b") | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    mixture |= {"decoder_sparse_step": 3, "mlp_only_layers": [5], "num_hidden_layers": 9}
    flags = megatron_flags(mixture)
    assert flags["moe_layer_freq"] == "[0,0,1,0,0,0,0,0,1]"
    read = architecture_from_flags(given(shlex.join(words(flags))))
    assert read is not None
    assert read.layers == architecture_of(mixture).layers


def test_without_flags_of_a_shape_there_is_no_architecture() -> None:
    assert architecture_from_flags(given("--attention-softmax-in-fp32")) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "--num-layers 2 --hidden-size 8",
            "a llama model from MODEL_ARGS: they lack --ffn-hidden-size, --num-attention-heads, --vocab-size",
        ),
        (
            PUBLIC_FLASH.replace("--kv-lora-rank 512", "--max-position-embeddings 9"),
            "a deepseek_v3 model from MODEL_ARGS: they lack --kv-lora-rank; add it,",
        ),
        (
            PUBLIC_FLASH.replace("[1]*46", "[1]*45") + "--max-position-embeddings 9",
            "--moe-layer-freq is a list of length 46, but --num-layers is 47",
        ),
        (PUBLIC_FLASH.replace("[0]*1+[1]*46", "[1]*46+[0]*1") + "--max-position-embeddings 9", "has all dense layers first"),
        (
            PUBLIC_FLASH.replace("intermediate-size 1536", "intermediate-size 1000") + "--max-position-embeddings 9",
            "1000 is not a multiple",
        ),
        (PUBLIC_GLM4_9B.replace("get_glm_spec", "get_x_spec"), "--spec slime_plugins.models.glm4 get_x_spec is not known"),
        (
            "--num-layers 2 --spec slime_plugins.models.qwen3_next get_qwen3_next_spec --use-gated-attention",
            "cannot train such a model: the gated delta net .*; use --train-backend torch, without MODEL_ARGS",
        ),
        (
            "--num-layers 2 --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec",
            "cannot train such a model: the gated delta net .*; use --train-backend torch",
        ),
        (
            "--num-layers 2 --spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec",
            "cannot train such a model: its query and key norms span all heads, .*; use --train-backend torch",
        ),
        (
            "--num-layers 2 --attention-output-gate --moe-shared-expert-gate",
            "--attention-output-gate, --moe-shared-expert-gate: --train-backend megatron cannot train models with such gates",
        ),
    ],
)
def test_flags_that_describe_no_model_are_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        architecture_from_flags(given(text))


def test_flags_cannot_say_which_layers_compute_their_token_choice() -> None:
    text = shlex.join(words(megatron_flags(model("glm5.2-744b"))))
    with pytest.raises(ConfigError, match="--model-config-file"):
        architecture_from_flags(given(text))


def test_linear_attention_has_no_flags_and_no_names() -> None:
    """The reason is given before anything starts."""
    config = LINEAR | MOE | {"model_type": "qwen3_next", "num_experts": 6, "num_hidden_layers": 4}
    for read in (stated_flags, names_of):
        with pytest.raises(
            ConfigError, match=r"the gated delta net of Megatron-Core 0\.16\.1 refuses packed sequences; use --train-backend torch"
        ):
            read(config)
