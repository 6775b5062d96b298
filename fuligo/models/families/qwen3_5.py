"""Qwen3.5, dense: Qwen3-Next's attention; published with a vision tower, which is Qwen3-VL's without DeepStack."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3_next, qwen3_vl
from fuligo.models.family import ModelArgs


def architecture(config: ConfigJson) -> Architecture:
    return qwen3_next.hybrid_architecture(config, None, lambda _: False, num_mtp_layers=num_mtp_layers(config))


def num_mtp_layers(config: ConfigJson) -> int:
    return config.index("mtp_num_hidden_layers", default=0)


FAMILY = replace(
    qwen3_next.FAMILY,
    architecture=architecture,
    model_args=ModelArgs(specs=("slime_plugins.models.qwen3_5.get_qwen3_5_spec",)),
    why_not_sglang="SGLang 0.5.15.post1 has a class only for the published model with its vision tower",
    whole_type="qwen3_5",
    vision_tower=qwen3_vl.vision_tower,
)
