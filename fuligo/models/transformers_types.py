"""Model types in transformers: published types that transformers 5.12.1 lacks, and models that combine a language model with towers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils.quantization_config import Mxfp4Config

from fuligo.formats.hugging_face import MXFP4
from fuligo.models.gated_delta import DECAY_RATES
from fuligo.models.registry import FAMILIES, WHOLE_TYPES, has_linear_attention

LOADED_AS: Mapping[str, str] = {name: family.loaded_as for name, family in FAMILIES.items() if family.loaded_as is not None}
"""model_type in config.json -> model_type whose classes load it. `save_pretrained` writes the latter."""


def read_config(directory: str | Path) -> Any:
    """Read the config of a checkpoint with transformers, without running code of the directory.

    Registers the types of `LOADED_AS` first, so that transformers can also load the weights afterwards. Raises OSError, ValueError or
    KeyError if there is no config.json, or transformers does not know its model type.
    """
    register_types()
    return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def has_tower(config: Any) -> bool:
    """Return whether a config describes a supported model with vision or audio towers."""
    return config.model_type in WHOLE_TYPES


def has_unknown_tower(config: Any) -> bool:
    """Return whether a config describes a vision-language model that fuligo does not support."""
    return not has_tower(config) and not hasattr(config, "vocab_size") and hasattr(config, "vision_config")


def text_config(config: Any) -> Any:
    """Return the config of the language model, which is `config` itself for a text-only model."""
    return config.text_config if has_tower(config) else config


def model_class(config: Any) -> Any:
    return AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM


def attention_choice(config: Any, name: str) -> str | dict[str, str]:
    """Return the `attn_implementation` that selects attention `name` for the language model and SDPA for towers."""
    if not has_tower(config):
        return name
    towers = [part for part in config.sub_configs if part != "text_config" and getattr(config, part, None) is not None]
    return {"": name, "text_config": name, **dict.fromkeys(towers, "sdpa")}


def language_model(model: Any) -> Any:
    """Return the language model inside a model, without its output layer."""
    base = model.base_model
    return base.language_model if has_tower(model.config) else base


def freeze_towers(model: Any) -> None:
    """Freeze all parts of a model with towers except its language model and head; no-op for a text-only model."""
    if has_tower(model.config):
        for name, part in model.base_model.named_children():
            if name != "language_model":
                part.requires_grad_(False)


LANGUAGE_MODEL_ALONE = (
    "it has a tower that fuligo does not know; save its language model by itself: AutoModelForCausalLM.from_pretrained(A)"
    ".save_pretrained(B), or for Gemma 3 the script of docs/models.md"
)


def register_types() -> None:
    """Register the types of `LOADED_AS` with transformers: their config classes, and the conversion of their stored experts."""
    for name, known in LOADED_AS.items():
        if name not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(name, CONFIG_MAPPING[known])
            register_checkpoint_conversion_mapping(name, get_checkpoint_conversion_mapping(known) or [])


def loading_options(config: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that make transformers dequantize MXFP4 to bfloat16; empty for other checkpoints."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if _is_mxfp4(config) else {}


def load_decay_rates_exactly(config: Any) -> None:
    """Make transformers load the decay rates of Gated DeltaNet layers in float32, as in checkpoints and SGLang, for the whole process."""
    if has_linear_attention(config.to_dict()):
        loaded_as: Any = model_class(config)._model_mapping[type(config)]
        loaded_as._keep_in_fp32_modules_strict = {*(loaded_as._keep_in_fp32_modules_strict or ()), DECAY_RATES.strip(".")}


def take_dtype(model: nn.Module, config: Any, dtype: torch.dtype) -> None:
    """Convert a model to `dtype` if it was dequantized from MXFP4: transformers 5.12.1 always dequantizes to bfloat16."""
    if _is_mxfp4(config) and dtype != torch.bfloat16:
        model.to(dtype)


def _is_mxfp4(config: Any) -> bool:
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == MXFP4
