"""MODEL_ARGS read as a config.json: where there is none, and where they are to win over it. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuligo.config import Config
from fuligo.config.flag import option_name
from fuligo.config.passthrough import PassThrough
from fuligo.errors import ConfigError
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.flag_names import EXPERT_KEYS, GROUPED_ATTENTION_KEYS, LATENT_ATTENTION_KEYS, SHAPE_KEYS, SPARSE_INDEX_KEYS, spec_family
from fuligo.models.registry import architecture_of

_LATENT = {"deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"}
"""Families with latent attention."""


def architecture_from_flags(config: Config) -> Architecture | None:
    """The shapes that the MODEL_ARGS describe by themselves, or None where none is given.

    Raises:
        ConfigError: some are missing; or what they lack has no flag.
    """
    given = config.megatron
    if not any(name in given for name in SHAPE_KEYS):
        return None
    family = _family(given)
    missing = [option_name(name) for name in _required(family) if name not in given]
    if missing:
        raise ConfigError(
            f"MODEL_ARGS describe a {family} model without {', '.join(missing)}; "
            "give them, or --model-config-file with the model's config.json"
        )
    if family == "glm_moe_dsa":
        raise ConfigError(
            "no flag of MODEL_ARGS says which layers compute their token choice (sparse attention); "
            "give --model-config-file with the model's config.json"
        )
    return architecture_of({"model_type": family, **_as_config_json(given, family)}, "MODEL_ARGS")


def overridden(config_json: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """A config.json with the MODEL_ARGS that are given in place of its own values."""
    values = dict(ConfigJson.of(config_json).values)
    return values | _as_config_json(config.megatron, str(values.get("model_type")))


def _family(given: PassThrough) -> str:
    """The family whose layers the flags make; where several differ in nothing but their name, the first that had them."""
    spec = given.get("spec")
    if spec is not None:
        family = spec_family(spec)
        if family is None:
            raise ConfigError(f"--spec {' '.join(spec)} is not known; give --model-config-file with the model's config.json instead")
        return family
    if given.get("experimental_attention_variant") == "dsa":
        return "glm_moe_dsa"
    if given.get("multi_latent_attention"):
        return "deepseek_v3"
    if "num_experts" in given:
        return "glm4_moe" if given.get("moe_router_score_function") == "sigmoid" else "qwen3_moe"
    if given.get("post_self_attn_layernorm"):
        return "glm4"
    if given.get("qk_layernorm"):
        return "qwen3"
    return "qwen2" if given.get("add_qkv_bias") else "llama"


def _required(family: str) -> tuple[str, ...]:
    """Flags without which such a model has no shape."""
    has_experts = family in {"deepseek_v3", "glm4_moe", "glm_moe_dsa", "qwen3_moe"}
    latent = tuple(LATENT_ATTENTION_KEYS) if family in _LATENT else ()
    return (*SHAPE_KEYS, *latent, *((*EXPERT_KEYS, "moe_layer_freq") if has_experts else ()))


def _as_config_json(given: PassThrough, family: str) -> dict[str, Any]:
    """The given flags as keys of a family's config.json."""
    keys = {**SHAPE_KEYS, **SPARSE_INDEX_KEYS, **EXPERT_KEYS}
    keys |= LATENT_ATTENTION_KEYS if family in _LATENT else GROUPED_ATTENTION_KEYS
    keys |= {"norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
    keys |= {"moe_router_topk_scaling_factor": "routed_scaling_factor", "qk_layernorm": "use_qk_norm"}
    if family == "qwen3_moe":
        keys["num_experts"] = "num_experts"
    values = {key: given.get(flag) for flag, key in keys.items() if flag in given}
    if "num_layers" in given:
        # A whole set of MODEL_ARGS: what it leaves out is off.
        values.setdefault("num_key_value_heads", given.get("num_attention_heads"))
        values["tie_word_embeddings"] = not given.get("untie_embeddings_and_output_weights")
        values["attention_bias"] = family not in _LATENT and bool(given.get("add_qkv_bias"))
    return values | _experts(given, family)


def _experts(given: PassThrough, family: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    size, shared_size = given.get("moe_ffn_hidden_size"), given.get("moe_shared_expert_intermediate_size") or 0
    if size is not None and family != "qwen3_moe":
        if shared_size % size:
            raise ConfigError(
                f"--moe-shared-expert-intermediate-size {shared_size} is not a multiple of --moe-ffn-hidden-size {size}: "
                f"a {family} model has whole shared experts"
            )
        values["n_shared_experts"] = shared_size // size
    frequency, num_layers = given.get("moe_layer_freq"), given.get("num_layers")
    if frequency is None or num_layers is None:
        return values
    pattern = frequency if isinstance(frequency, list) else [int(number % frequency == 0) for number in range(num_layers)]
    if len(pattern) != num_layers:
        raise ConfigError(f"--moe-layer-freq has {len(pattern)} layers, --num-layers is {num_layers}")
    dense = [number for number, has_experts in enumerate(pattern) if not has_experts]
    if family == "qwen3_moe":
        return values | {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if dense != list(range(len(dense))):
        raise ConfigError(f"--moe-layer-freq has a dense layer after one with experts; a {family} model starts with its dense layers")
    return values | {"first_k_dense_replace": len(dense), "mlp_layer_types": ["dense" if not each else "sparse" for each in pattern]}
