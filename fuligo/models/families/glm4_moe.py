"""GLM-4.5, GLM-4.6 and GLM-4.7, mixture of experts (arXiv 2508.06471): grouped attention; the large models norm queries and keys."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import grouped_attention, moe_table, with_mtp_layers
from fuligo.models.names import NameTable
from fuligo.models.parts import grouped_attention_parts, moe_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    heads = read_grouped_attention(config)
    parts = grouped_attention_parts(heads, config.count("hidden_size"), **_biases_and_norms(config))
    return moe_architecture(config, heads, parts, config.index("first_k_dense_replace", default=1))


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    attention = grouped_attention(architecture, **_biases_and_norms(config))
    return with_mtp_layers(moe_table(architecture, attention, has_expert_bias=True), architecture)


def _biases_and_norms(config: ConfigJson) -> dict[str, bool]:
    return {"qkv_bias": config.switch("attention_bias", default=False), "qk_norm": config.switch("use_qk_norm", default=False)}
