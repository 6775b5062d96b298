"""config.json -> shapes."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.mixture import mixture_architecture, read_num_dense_layers
from fuligo.models.parts import latent_attention_parts, read_latent_attention


def architecture(config: ConfigJson) -> Architecture:
    """DeepSeek-V3's layers at a small size; the first layer is dense."""
    heads = read_latent_attention(config)
    num_dense_layers = read_num_dense_layers(config, default=1)
    if num_dense_layers != 1 and config.values.get("mlp_layer_types") is None:
        # transformers takes mlp_layer_types, one dense layer by default; the engines take first_k_dense_replace.
        raise config.contradiction(f"first_k_dense_replace {num_dense_layers} needs mlp_layer_types, which transformers reads instead")
    parts = latent_attention_parts(heads, config.count("hidden_size"), bias=config.switch("attention_bias", default=False))
    return mixture_architecture(config, heads, parts, num_dense_layers)
