"""GLM-4.7-Flash: DeepSeek-V3's layers at a small size; the first layer is dense."""

from dataclasses import replace

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import deepseek_v3
from fuligo.models.parts import moe_architecture, read_latent_attention, read_num_dense_layers


def architecture(config: ConfigJson) -> Architecture:
    num_dense_layers = read_num_dense_layers(config, default=1)
    if num_dense_layers != 1 and config.values.get("mlp_layer_types") is None:
        # transformers reads mlp_layer_types (one dense layer by default), the engines first_k_dense_replace.
        raise config.contradiction(
            f"first_k_dense_replace {num_dense_layers} needs mlp_layer_types, which transformers reads instead; add mlp_layer_types"
        )
    return moe_architecture(config, read_latent_attention(config), num_dense_layers)


FAMILY = replace(deepseek_v3.FAMILY, architecture=architecture)
