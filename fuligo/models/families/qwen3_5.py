"""Qwen3.5, language model only, dense: Qwen3-Next's attention."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3_next
from fuligo.models.names import NameTable


def architecture(config: ConfigJson) -> Architecture:
    return qwen3_next.hybrid_architecture(config, None, lambda _: False)


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return qwen3_next.names(config, architecture)
