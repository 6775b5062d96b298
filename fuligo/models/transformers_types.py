"""Published model types that transformers 5.12.1 lacks, although it has their layers under another type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

LOADED_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""model_type of config.json -> type whose classes load it. `save_pretrained` writes the latter."""


def read_config(directory: str | Path) -> Any:
    """Return the config of a checkpoint as transformers reads it, without running code of the directory.

    Afterwards transformers loads the checkpoint's weights, too.

    Raises:
        OSError: there is no config.json.
        ValueError: transformers does not know the model type.
        KeyError: config.json has no model type.
    """
    register_types()
    return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def has_vision_tower(config: Any) -> bool:
    """Return whether a config describes a model of text and images, whose shapes are those of its parts."""
    return not hasattr(config, "vocab_size") and hasattr(config, "vision_config")


LANGUAGE_MODEL_ALONE = (
    "it has a vision tower; save its language model by itself: AutoModelForCausalLM.from_pretrained(A).save_pretrained(B)"
)


def register_types() -> None:
    """Register the types of `LOADED_AS` with transformers: their configs, and how experts stored one by one become one tensor."""
    for name, known in LOADED_AS.items():
        if name not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(name, CONFIG_MAPPING[known])
            register_checkpoint_conversion_mapping(name, get_checkpoint_conversion_mapping(known) or [])
