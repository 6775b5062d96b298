"""MiMo-7B (arXiv 2505.07608): Qwen2's layers, and MTP layers of the same kind."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family
from fuligo.models.name_parts import dense_table, grouped_attention, mtp_projection, norm
from fuligo.models.names import Form, NameTable
from fuligo.models.parts import dense_architecture, read_grouped_attention


def architecture(config: ConfigJson) -> Architecture:
    heads = read_grouped_attention(config, qkv_bias=True)
    return dense_architecture(config, heads, num_mtp_layers=config.index("num_nextn_predict_layers", default=0))


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Return the weight names; MTP layers are numbered from 0, and their projection takes the hidden state before the embedding."""
    mtp = (
        norm(architecture, "enorm", "token_layernorm"),
        norm(architecture, "hnorm", "hidden_layernorm"),
        mtp_projection(architecture, "input_proj", Form.SWAPPED_HALVES),
        norm(architecture, "final_layernorm"),
    )
    table = dense_table(architecture, grouped_attention(architecture))
    return replace(table, mtp=mtp, mtp_prefix="model.mtp_layers.{mtp}.")


FAMILY = Family(architecture=architecture, names=names, why_not_transformers="transformers 5.12.1 does not implement its layers")
