"""Qwen3.5, language model only, mixture of experts: Qwen3-Next's layers, each with experts."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3_next
from fuligo.models.names import NameTable
from fuligo.models.parts import read_experts


def architecture(config: ConfigJson) -> Architecture:
    experts = read_experts(config, num_experts_key="num_experts", shared=False)
    return qwen3_next.hybrid_architecture(config, experts, lambda _: True)


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return qwen3_next.names(config, architecture)
