"""Names of the weights."""

from __future__ import annotations

from dataclasses import replace

from fuligo.models.architecture import Architecture, LatentAttention
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import latent_attention, moe_table, with_prediction_layers
from fuligo.models.names import NameTable, Weight, Weights


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """DeepSeek-V3's, with an indexer in the layers that compute their token choice and in prediction layers."""
    table = with_prediction_layers(moe_table(architecture, latent_attention(architecture), has_expert_bias=True), architecture)
    return replace(table, indexer=_indexer(architecture))


def _indexer(architecture: Architecture) -> Weights:
    """Every tensor-parallel rank has all of it. Modules are called as those of Megatron-Core's `DSAIndexer`."""
    heads, index, hidden = architecture.attention, architecture.sparse_index, architecture.hidden_size
    assert isinstance(heads, LatentAttention) and heads.q_lora_rank is not None and index is not None
    return (
        _row("linear_wq_b.weight", "wq_b.weight", (index.num_heads * index.head_dim, heads.q_lora_rank)),
        _row("linear_wk.weight", "wk.weight", (index.head_dim, hidden)),
        _row("k_norm.weight", "k_norm.weight", (index.head_dim,)),
        _row("k_norm.bias", "k_norm.bias", (index.head_dim,)),
        _row("linear_weights_proj.weight", "weights_proj.weight", (index.num_heads, hidden)),
    )


def _row(megatron: str, checkpoint: str, shape: tuple[int, ...]) -> Weight:
    return Weight(f"self_attention.core_attention.indexer.{megatron}", (f"self_attn.indexer.{checkpoint}",), shape)
