"""Qwen3.5, mixture of experts: Qwen3-Next's layers, each with experts; published with the dense models' vision tower."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3_5, qwen3_next
from fuligo.models.parts import read_experts


def architecture(config: ConfigJson) -> Architecture:
    experts = read_experts(config, num_experts_key="num_experts", shared=False)
    return qwen3_next.hybrid_architecture(config, experts, lambda _: True, num_mtp_layers=qwen3_5.num_mtp_layers(config))


FAMILY = replace(qwen3_5.FAMILY, architecture=architecture, whole_type="qwen3_5_moe", stores_either_experts=True)
