"""The model families whose shapes are known, by `model_type`. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.deepseek_v3.architecture import architecture as deepseek_v3
from fuligo.models.deepseek_v3.names import names as deepseek_v3_names
from fuligo.models.glm4.architecture import architecture as glm4
from fuligo.models.glm4.names import names as glm4_names
from fuligo.models.glm4_moe.architecture import architecture as glm4_moe
from fuligo.models.glm4_moe.names import names as glm4_moe_names
from fuligo.models.glm4_moe_lite.architecture import architecture as glm4_moe_lite
from fuligo.models.glm4_moe_lite.names import names as glm4_moe_lite_names
from fuligo.models.glm_moe_dsa.architecture import architecture as glm_moe_dsa
from fuligo.models.glm_moe_dsa.names import names as glm_moe_dsa_names
from fuligo.models.llama.architecture import architecture as llama
from fuligo.models.llama.names import names as llama_names
from fuligo.models.mimo.architecture import architecture as mimo
from fuligo.models.mimo.names import names as mimo_names
from fuligo.models.names import ModelNames, NameTable
from fuligo.models.qwen2.architecture import architecture as qwen2
from fuligo.models.qwen2.names import names as qwen2_names
from fuligo.models.qwen3.architecture import architecture as qwen3
from fuligo.models.qwen3.names import names as qwen3_names
from fuligo.models.qwen3_moe.architecture import architecture as qwen3_moe
from fuligo.models.qwen3_moe.names import names as qwen3_moe_names

FAMILIES: Mapping[str, Callable[[ConfigJson], Architecture]] = {
    "deepseek_v3": deepseek_v3,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "llama": llama,
    "mimo": mimo,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}

NAMES: Mapping[str, Callable[[ConfigJson, Architecture], NameTable]] = {
    "deepseek_v3": deepseek_v3_names,
    "glm4": glm4_names,
    "glm4_moe": glm4_moe_names,
    "glm4_moe_lite": glm4_moe_lite_names,
    "glm_moe_dsa": glm_moe_dsa_names,
    "llama": llama_names,
    "mimo": mimo_names,
    "qwen2": qwen2_names,
    "qwen3": qwen3_names,
    "qwen3_moe": qwen3_moe_names,
}
assert NAMES.keys() == FAMILIES.keys()


def architecture_of(config_json: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """The shapes of the model that a config.json describes.

    Args:
        source: where it was read, for errors.

    Raises:
        ConfigError: an unknown model_type, or a key that is missing, malformed, or contradicts another.
    """
    config = ConfigJson.of(config_json, source)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(f"{source}: model_type {config.model_type} is not one whose shapes are known: {', '.join(FAMILIES)}")
    return family(config)


def names_of(config_json: Mapping[str, Any], source: str = "config.json") -> ModelNames:
    """The names of all weights of the model that a config.json describes, in its checkpoint and in Megatron.

    Raises:
        ConfigError: as `architecture_of`.
    """
    config, architecture = ConfigJson.of(config_json, source), architecture_of(config_json, source)
    return ModelNames(architecture, NAMES[config.model_type](config, architecture))


def read_architecture(path: Path) -> Architecture:
    """The shapes of the model whose config.json is at `path`, or in the directory `path`.

    Raises:
        ConfigError: as `read_config_json` and `architecture_of`.
    """
    file = path / "config.json" if path.is_dir() else path
    return architecture_of(read_config_json(path), str(file))
