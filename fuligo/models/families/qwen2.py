"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): queries, keys and values always have a bias; config.json does not say so."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import plain_dense_names
from fuligo.models.parts import dense_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    return dense_architecture(config, read_grouped_attention(config, qkv_bias=True))


FAMILY = Family(
    architecture=architecture,
    names=plain_dense_names,
    batch_invariant_on=("cpu", "cuda"),
    model_args=ModelArgs(identified_by={"add_qkv_bias": True}, precedence=1),
)
