"""Qwen3.5, language model only, dense: Qwen3-Next's attention."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3_next


def architecture(config: ConfigJson) -> Architecture:
    return qwen3_next.hybrid_architecture(config, None, lambda _: False)


FAMILY = replace(
    qwen3_next.FAMILY,
    architecture=architecture,
    why_not_sglang="SGLang 0.5.15.post1 has a class only for the whole model, with its vision tower",
)
