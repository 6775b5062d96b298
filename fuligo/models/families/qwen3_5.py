"""Qwen3.5, dense and mixture of experts: Qwen3-Next's layers; published with a vision tower, which is Qwen3-VL's without DeepStack."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3_next, qwen3_vl
from fuligo.models.family import ModelArgs
from fuligo.models.parts import read_experts


def architecture(config: ConfigJson) -> Architecture:
    return qwen3_next.hybrid_architecture(config, None, (), num_mtp_layers=config.index("mtp_num_hidden_layers", default=0))


def moe_architecture(config: ConfigJson) -> Architecture:
    """Return the shapes of a model whose layers all have experts."""
    experts, every = read_experts(config, num_experts_key="num_experts", shared=False), range(config.count("num_hidden_layers"))
    return qwen3_next.hybrid_architecture(config, experts, every, num_mtp_layers=config.index("mtp_num_hidden_layers", default=0))


FAMILY = replace(
    qwen3_next.FAMILY,
    architecture=architecture,
    model_args=ModelArgs(specs=("slime_plugins.models.qwen3_5.get_qwen3_5_spec",)),
    why_not_sglang="SGLang 0.5.15.post1 has a class only for the published model with its vision tower",
    whole_type="qwen3_5",
    vision_tower=qwen3_vl.vision_tower,
)
MOE_FAMILY = replace(FAMILY, architecture=moe_architecture, whole_type="qwen3_5_moe", stores_either_experts=True)
