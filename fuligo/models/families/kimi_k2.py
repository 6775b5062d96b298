"""Kimi K2 and K2 Thinking, text (arXiv 2507.20534): DeepSeek-V3's layers with more experts, fewer heads, and one dense layer.

transformers 5.12.1 has no classes of this name: its DeepSeek-V3 loads the checkpoints, as SGLang 0.5.15.post1 does.
"""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import deepseek_v3
from fuligo.models.names import NameTable


def architecture(config: ConfigJson) -> Architecture:
    return deepseek_v3.architecture(config)


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return deepseek_v3.names(config, architecture)
