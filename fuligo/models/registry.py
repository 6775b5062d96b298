"""Model families by `model_type`. Imports neither numpy nor torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import (
    deepseek_v3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    kimi_k2,
    llama,
    mimo,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from fuligo.models.names import ModelNames, NameTable


class Family(Protocol):
    """Module of a model family."""

    def architecture(self, config: ConfigJson) -> Architecture:
        """Return the shapes that a config.json describes; raises ConfigError for keys that are missing or contradict each other."""
        ...

    def names(self, config: ConfigJson, architecture: Architecture) -> NameTable:
        """Return the names of the weights in the checkpoint and in Megatron."""
        ...


FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": deepseek_v3,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "kimi_k2": kimi_k2,
    "llama": llama,
    "mimo": mimo,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}


def architecture_of(config_json: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """Return the shapes of the model that a config.json describes.

    Args:
        source: where it was read, for errors.

    Raises:
        ConfigError: model_type is unknown, or a key is missing, malformed, or contradicts another.
    """
    config = ConfigJson.of(config_json, source)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(f"{source}: model_type {config.model_type} is not supported; supported are {', '.join(FAMILIES)}")
    return family.architecture(config)


def names_of(config_json: Mapping[str, Any], source: str = "config.json") -> ModelNames:
    """Return the names of all weights of the model that a config.json describes, in its checkpoint and in Megatron.

    Raises:
        ConfigError: as `architecture_of`.
    """
    config, architecture = ConfigJson.of(config_json, source), architecture_of(config_json, source)
    return ModelNames(architecture, FAMILIES[config.model_type].names(config, architecture))


def read_architecture(path: Path) -> Architecture:
    """Return the shapes of the model whose config.json is at `path`, or in the directory `path`.

    Raises:
        ConfigError: as `read_config_json` and `architecture_of`.
    """
    file = path / "config.json" if path.is_dir() else path
    return architecture_of(read_config_json(path), str(file))
