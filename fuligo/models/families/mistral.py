"""Mistral (arXiv 2310.06825) without windows, as published from 7B v0.2 on: the layers of Llama, with the head size in config.json."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family
from fuligo.models.name_parts import plain_dense_names
from fuligo.models.parts import dense_architecture, read_grouped_attention

WINDOW = 4096
"""Default of `sliding_window` if config.json does not set it."""


def architecture(config: ConfigJson) -> Architecture:
    """Return the shapes. Raises ConfigError for a model with windows, which SGLang would serve without them."""
    if (window := config.values.get("sliding_window", WINDOW)) is not None:
        raise config.contradiction(
            f"sliding_window is {window!r:.80}; SGLang computes Mistral without windows, so only null is supported; set it to null if no "
            "sample is longer than the window, else choose another model"
        )
    return dense_architecture(config, read_grouped_attention(config))


FAMILY = Family(architecture=architecture, names=plain_dense_names)
