"""Conversion of MODEL_ARGS to the keys of a config.json, to replace or override it. Imports neither numpy nor torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from fuligo.config import Config
from fuligo.config.flag import option_name
from fuligo.config.passthrough import PassThrough
from fuligo.errors import ConfigError
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import ModelArgs
from fuligo.models.registry import FAMILIES, architecture_of

SHAPE_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
"""Megatron flag -> key of config.json, in every family."""

GROUPED_ATTENTION_KEYS: Mapping[str, str] = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}

LATENT_ATTENTION_KEYS: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}

SPARSE_INDEX_KEYS: Mapping[str, str] = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}

EXPERT_KEYS: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
"""Megatron flag of experts -> key of config.json; the key for `num_experts` is `ModelArgs.num_experts_key` instead."""

GATES = ("attention_output_gate", "use_gated_attention", "moe_shared_expert_gate")
"""Switches for gates of attention and shared experts; the Megatron trainer supports no family that has such gates."""
TORCH_INSTEAD = "use --train-backend torch, without MODEL_ARGS and flags of parallelism"
"""Advice for a model that the Megatron trainer cannot train."""


def architecture_from_flags(config: Config) -> Architecture | None:
    """Return the shapes that the MODEL_ARGS describe, None without any. Raises ConfigError if they do not describe the model completely."""
    given = config.megatron
    if not any(name in given for name in SHAPE_KEYS):
        return None
    family = _family(given)
    if missing := [option_name(name) for name in _required(family) if name not in given]:
        raise ConfigError(
            f"cannot read a {family} model from MODEL_ARGS: they lack {', '.join(missing)}; "
            f"add {'it' if len(missing) == 1 else 'them'}, or use --model-config-file with the model's config.json"
        )
    if (reason := FAMILIES[family].model_args.incomplete_because) is not None:
        raise ConfigError(f"cannot read a {family} model from MODEL_ARGS: {reason}; use --model-config-file with the model's config.json")
    return architecture_of({"model_type": family, **_as_config_json(given, family)}, "MODEL_ARGS")


def overridden(config_json: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the language model's part of a config.json, with values replaced by the run's MODEL_ARGS; as it is for an unknown family."""
    values = dict(ConfigJson.of(config_json).values)
    family = str(values.get("model_type"))
    return values | (_as_config_json(config.megatron, family) if family in FAMILIES else {})


def _family(given: PassThrough) -> str:
    """Return the family that MODEL_ARGS describe: that of `--spec`, else the one with the highest precedence whose flags match."""
    if (spec := given.get("spec")) is not None:
        family = spec_family(spec)
        if family is None:
            raise ConfigError(f"--spec {' '.join(spec)} is not known; use --model-config-file with the model's config.json instead")
        if (reason := FAMILIES[family].why_not_megatron) is not None:
            raise ConfigError(f"--spec {' '.join(spec)}: --train-backend megatron cannot train such a model: {reason}; {TORCH_INSTEAD}")
        return family
    if (problem := gates_problem(given)) is not None:
        raise ConfigError(problem)
    precedences = {name: family.model_args.precedence for name, family in FAMILIES.items() if _identifies(given, family.model_args)}
    return max(precedences, key=precedences.__getitem__)


def gates_problem(given: PassThrough) -> str | None:
    """Return the problem with given `GATES`; None if none is given."""
    gates = ", ".join(option_name(name) for name in GATES if given.get(name))
    return (
        f"{gates}: --train-backend megatron cannot train models with such gates (Qwen3-Next, Qwen3.5); {TORCH_INSTEAD}" if gates else None
    )


def _identifies(given: PassThrough, args: ModelArgs) -> bool:
    """Return whether MODEL_ARGS contain the flags that identify a family."""
    if args.identified_by is None:
        return False
    return all(bool(given.get(flag)) if value is True else given.get(flag) == value for flag, value in args.identified_by.items())


def _required(family: str) -> tuple[str, ...]:
    """Return the flags without which the shapes of a model of a family cannot be determined."""
    args = FAMILIES[family].model_args
    latent = tuple(LATENT_ATTENTION_KEYS) if args.is_latent else ()
    return (*SHAPE_KEYS, *latent, *((*EXPERT_KEYS, "moe_layer_freq") if args.needs_experts else ()))


def _as_config_json(given: PassThrough, family: str) -> dict[str, Any]:
    args = FAMILIES[family].model_args
    keys = {**SHAPE_KEYS, **SPARSE_INDEX_KEYS, **EXPERT_KEYS, "num_experts": args.num_experts_key}
    keys |= LATENT_ATTENTION_KEYS if args.is_latent else GROUPED_ATTENTION_KEYS
    keys |= {"norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
    keys |= {"moe_router_topk_scaling_factor": "routed_scaling_factor", "qk_layernorm": "use_qk_norm"}
    values = {key: given.get(flag) for flag, key in keys.items() if flag in given}
    if "num_layers" in given:
        # A complete set of MODEL_ARGS: omitted flags are off.
        values.setdefault("num_key_value_heads", given.get("num_attention_heads"))
        values["tie_word_embeddings"] = not given.get("untie_embeddings_and_output_weights")
        values["attention_bias"] = not args.is_latent and bool(given.get("add_qkv_bias"))
    return values | _experts(given, family)


def _experts(given: PassThrough, family: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    size, shared_size = given.get("moe_ffn_hidden_size"), given.get("moe_shared_expert_intermediate_size") or 0
    if size is not None and not FAMILIES[family].model_args.lists_dense_layers:
        if shared_size % size:
            raise ConfigError(
                f"--moe-shared-expert-intermediate-size {shared_size} is not a multiple of --moe-ffn-hidden-size {size}: "
                f"each shared expert of a {family} model has the size of a routed one; use a multiple"
            )
        values["n_shared_experts"] = shared_size // size
    frequency, num_layers = given.get("moe_layer_freq"), given.get("num_layers")
    if frequency is None or num_layers is None:
        return values
    num_layers = ConfigJson({"num_hidden_layers": num_layers}, "MODEL_ARGS").count("num_hidden_layers")  # checks the limit
    pattern = frequency if isinstance(frequency, list) else [int(number % frequency == 0) for number in range(num_layers)]
    if len(pattern) != num_layers:
        raise ConfigError(f"--moe-layer-freq is a list of length {len(pattern)}, but --num-layers is {num_layers}; use one entry per layer")
    dense = [number for number, has_experts in enumerate(pattern) if not has_experts]
    if FAMILIES[family].model_args.lists_dense_layers:
        return values | {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if dense != list(range(len(dense))):
        raise ConfigError(
            f"--moe-layer-freq has a dense layer after one with experts, but a {family} model has all dense layers first; give a list that "
            f"begins with its zeros, such as [0]*1+[1]*{num_layers - 1}"
        )
    return values | {"first_k_dense_replace": len(dense), "mlp_layer_types": ["dense" if not each else "sparse" for each in pattern]}


def spec_family(spec: Sequence[str]) -> str | None:
    """Return the model_type that a `--spec` of public slime scripts stands for, or None if it is unknown.

    `spec` is a module and a function, or one dotted path. fuligo has the layers of all families built in and needs no `--spec`.
    """
    path = ".".join(spec).replace(":", ".")
    return next((name for name, family in FAMILIES.items() if path in family.model_args.specs), None)
