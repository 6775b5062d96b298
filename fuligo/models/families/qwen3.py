"""Qwen3, dense (arXiv 2505.09388): norms on the heads of queries and keys; head_dim need not be hidden_size / heads."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import dense_table, grouped_attention
from fuligo.models.names import NameTable
from fuligo.models.parts import dense_architecture


def architecture(config: ConfigJson) -> Architecture:
    bias = config.switch("attention_bias", default=False)
    return dense_architecture(config, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=128)


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return dense_table(architecture, grouped_attention(architecture))


FAMILY = Family(
    architecture=architecture,
    names=names,
    batch_invariant_on=("cpu", "cuda"),
    model_args=ModelArgs(told_by={"qk_layernorm": True}, precedence=2),
)
