"""Llama (arXiv 2307.09288, 2407.21783): biases only where config.json asks for them."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import plain_dense_names
from fuligo.models.parts import dense_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    bias = config.switch("attention_bias", default=False)
    heads = read_grouped_attention(config, qkv_bias=bias, output_bias=bias, may_omit_kv_heads=True)
    return dense_architecture(config, heads, mlp_bias=config.switch("mlp_bias", default=False))


FAMILY = Family(
    architecture=architecture, names=plain_dense_names, batch_invariant_on=("cpu", "cuda"), model_args=ModelArgs(identified_by={})
)
