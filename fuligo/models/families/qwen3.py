"""Qwen3, dense (arXiv 2505.09388): norms on the heads of queries and keys; head_dim need not be hidden_size / heads."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import plain_dense_names
from fuligo.models.parts import dense_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    bias = config.switch("attention_bias", default=False)
    heads = read_grouped_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=128)
    return dense_architecture(config, heads)


FAMILY = Family(
    architecture=architecture,
    names=plain_dense_names,
    batch_invariant_on=("cpu", "cuda"),
    model_args=ModelArgs(identified_by={"qk_layernorm": True}, precedence=2),
)
