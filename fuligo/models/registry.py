"""Model families by `model_type`. Imports neither numpy nor torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import MTP_PREFIX, TENSORS, read_config_json, read_shapes
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import (
    deepseek_v3,
    deepseek_v32,
    gemma3_text,
    gemma4_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    kimi_k2,
    llama,
    mimo,
    minimax_m2,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
)
from fuligo.models.family import Family
from fuligo.models.names import ModelNames

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v32.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "gemma4_text": gemma4_text.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "kimi_k2": kimi_k2.FAMILY,
    "llama": llama.FAMILY,
    "mimo": mimo.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5_moe_text": qwen3_5.MOE_FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_vl_text": qwen3_vl.FAMILY,
}
REFUSED: Mapping[str, str] = {
    "nemotron_h": "transformers 5.12.1 passes the state of its Mamba layers from one packed sample to the next, and the Megatron trainer "
    "has no such layers: Megatron-Core 0.16.1 computes them only with the CUDA kernels of mamba-ssm"
}
"""Known model types that fuligo can neither train nor serve, with the reason."""
WHOLE_TYPES: Mapping[str, str] = {family.whole_type: name for name, family in FAMILIES.items() if family.whole_type is not None}
"""model_type of a model with vision or audio towers -> model_type of its language model."""
VISION_TYPES: Mapping[str, str] = {whole: name for whole, name in WHOLE_TYPES.items() if FAMILIES[name].sees_images}
"""Part of `WHOLE_TYPES` whose vision towers fuligo can run and train."""


def family_of(architecture: Architecture) -> Family:
    """Return the family of a model; for a model with towers, the family of its language model."""
    return FAMILIES[WHOLE_TYPES.get(architecture.model_type, architecture.model_type)]


def architecture_of(config_json: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """Return the shapes that the config.json at `source` describes. Raises ConfigError if model_type is unknown, or a key is invalid."""
    config = ConfigJson.of(config_json, source)
    family = FAMILIES.get(config.model_type)
    if family is None and (reason := REFUSED.get(config.model_type)) is not None:
        raise ConfigError(f"{source}: model_type {config.model_type} is not supported: {reason}; choose another model")
    if family is None:
        raise ConfigError(
            f"{source}: model_type {config.model_type} is not supported; use a model of one of the types {', '.join(FAMILIES)}"
        )
    architecture, model_type = family.architecture(config), config_json.get("model_type")
    if model_type not in WHOLE_TYPES:
        return architecture
    assert family.vision_tower is not None
    return replace(architecture, model_type=model_type, vision_tower=family.vision_tower(ConfigJson(config_json, source)))


def is_supported(config_json: Mapping[str, Any]) -> bool:
    """Return whether the model belongs to one of `FAMILIES`. The torch trainer also accepts other models, whose shapes are unknown."""
    return _language_type(config_json) in FAMILIES


def names_of(config_json: Mapping[str, Any], source: str = "config.json") -> ModelNames:
    """Return the names of a model's weights in checkpoint and Megatron. Raises ConfigError if the Megatron trainer cannot train it."""
    config, architecture = ConfigJson.of(config_json, source), architecture_of(config_json, source)
    family = FAMILIES[config.model_type]
    if family.names is None:
        raise ConfigError(
            f"cannot name the weights of a {config.model_type} model in Megatron: {family.why_not_megatron}; use --train-backend torch"
        )
    return ModelNames(architecture, family.names(config, architecture))


def has_linear_attention(config_json: Mapping[str, Any]) -> bool:
    """Return whether a model has linear attention; it may be of any type that transformers knows."""
    if _language_type(config_json) in FAMILIES:
        return bool(architecture_of(config_json).num_linear_layers)
    return "linear_attention" in (ConfigJson.of(config_json).values.get("layer_types") or ())


def unshareable_because(config_json: Mapping[str, Any]) -> str | None:
    """Return why the samples of a packed row cannot share the tokens of a common prefix; None if they can."""
    if has_linear_attention(config_json):
        return "its linear attention has one state per sequence, so several samples cannot continue a prefix"
    if _language_type(config_json) in FAMILIES and architecture_of(config_json).sparse_index is not None:
        return "its sparse attention chooses among the earlier tokens of the row, which in a tree include tokens of other samples"
    return None


def stored_experts(config_json: Mapping[str, Any]) -> StoredExperts:
    """Return the layout of a model's experts in checkpoints that transformers writes."""
    family = _family(config_json)
    return StoredExperts.APART if family is None else family.stored_experts


def experts_in(directory: Path) -> StoredExperts:
    """Return the layout of experts in a directory's checkpoint, or in the checkpoint that its training started from, if that is recorded.

    An MTP layer may have another layout.
    """
    config_json = read_config_json(directory)
    family = _family(config_json)
    if family is not None and family.stores_either_experts:
        record = directory / TENSORS
        names = json.loads(record.read_text()) if record.exists() else read_shapes(directory)
        is_whole = any(name.endswith(".experts.gate_up_proj") and not name.startswith(MTP_PREFIX) for name in names)
        return StoredExperts.WHOLE if is_whole else StoredExperts.APART
    return stored_experts(config_json)


def has_mtp_module(config_json: Mapping[str, Any]) -> bool:
    """Return whether checkpoints of a model's family have an MTP layer that `models.mtp` computes."""
    family = _family(config_json)
    return family is not None and family.has_mtp_module


def unwritten_keys(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of config.json that SGLang needs but transformers does not write."""
    family, values = _family(config_json), ConfigJson.of(config_json).values
    return {} if family is None else {key: values[key] for key in family.unwritten_keys if key in values}


def why_not_sglang(config_json: Mapping[str, Any]) -> str | None:
    """Return why SGLang cannot serve a model; None if it can, or the model type is unknown."""
    family = _family(config_json)
    return None if family is None or config_json.get("model_type") in WHOLE_TYPES else family.why_not_sglang


def _family(config_json: Mapping[str, Any]) -> Family | None:
    return FAMILIES.get(_language_type(config_json))


def _language_type(config_json: Mapping[str, Any]) -> str:
    """Return the type of a model, or of the language model in one of `WHOLE_TYPES`."""
    model_type = str(config_json.get("model_type"))
    return WHOLE_TYPES.get(model_type, model_type)


def batch_variant_because(config_json: Mapping[str, Any], device: str) -> str | None:
    """Return why `models.invariant_modules` cannot compute a model on a device, `cpu` or `cuda`; None if it can."""
    model_type = config_json.get("model_type")
    known = [name for name, family in FAMILIES.items() if device in family.batch_invariant_on]
    if model_type not in known:
        where = "GPUs" if device == "cuda" else "CPUs"
        return f"model_type {model_type} has layers without batch-invariant operations on {where}; supported are {', '.join(known)}"
    if config_json.get("quantization_config"):
        return "its weights are quantized"
    if config_json.get("use_sliding_window") or "sliding_attention" in (config_json.get("layer_types") or ()):
        return "it has sliding windows"
    if (activation := config_json.get("hidden_act", "silu")) not in ("silu", "swish"):
        return f"its activation is {activation}, not silu"
    rotary = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    if device == "cuda" and (config_json.get("mlp_only_layers") or config_json.get("decoder_sparse_step", 1) != 1):
        return "some of its layers have no experts, which SGLang does not support"
    if device == "cuda" and (kind := rotary.get("rope_type", rotary.get("type", "default"))) != "default":
        return f"its rotary embedding is of type {kind}, which SGLang computes differently"
    return None


def read_architecture(path: Path) -> Architecture:
    """Return the shapes of the model whose config.json is at `path`, or in the directory `path`."""
    file = path / "config.json" if path.is_dir() else path
    return architecture_of(read_config_json(path), str(file))
