"""DeepSeek-V3.2: DeepSeek-V3's layers with sparse attention (DSA); an indexer in every layer chooses the tokens that a query attends to."""

from dataclasses import replace

from fuligo.models.architecture import Architecture, LatentAttention, Layer, Part, PartKind, SparseIndex, Split
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import deepseek_v3
from fuligo.models.family import Family, ModelArgs
from fuligo.models.names import NameTable, Weight
from fuligo.models.parts import matrix, moe_architecture, read_latent_attention, read_num_dense_layers, vector


def architecture(config: ConfigJson) -> Architecture:
    heads = read_latent_attention(config)
    dense = moe_architecture(config, heads, read_num_dense_layers(config, default=3))
    index = SparseIndex(
        config.count("index_n_heads"),
        config.count("index_head_dim"),
        config.count("index_topk"),
        # As SGLang 0.5.15.post1 reads it, with its default; transformers 5.12.1 does not read it and never interleaves.
        rotary_interleaved=config.switch("indexer_rope_interleave", default=False),
    )
    indexer = _indexer_parts(index, heads, config)

    def with_indexer(layer: Layer) -> Layer:
        return replace(layer, parts=(*layer.parts, *indexer), computes_index=True)

    return replace(
        dense,
        layers=tuple(with_indexer(layer) for layer in dense.layers),
        mtp_layers=tuple(with_indexer(layer) for layer in dense.mtp_layers),
        sparse_index=index,
    )


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Return DeepSeek-V3's weight names and those of the indexer.

    Every tensor-parallel rank holds the whole indexer. Its modules have the names of Megatron-Core's `DSAIndexer`.
    """
    heads, index, hidden = architecture.attention, architecture.sparse_index, architecture.hidden_size
    assert isinstance(heads, LatentAttention) and heads.q_lora_rank is not None and index is not None

    def row(megatron: str, checkpoint: str, shape: tuple[int, ...]) -> Weight:
        return Weight(f"self_attention.core_attention.indexer.{megatron}", (f"self_attn.indexer.{checkpoint}",), shape)

    indexer = (
        row("linear_wq_b.weight", "wq_b.weight", (index.num_heads * index.head_dim, heads.q_lora_rank)),
        row("linear_wk.weight", "wk.weight", (index.head_dim, hidden)),
        row("k_norm.weight", "k_norm.weight", (index.head_dim,)),
        row("k_norm.bias", "k_norm.bias", (index.head_dim,)),
        row("linear_weights_proj.weight", "weights_proj.weight", (index.num_heads, hidden)),
    )
    return replace(deepseek_v3.names(config, architecture), indexer=indexer)


def _indexer_parts(index: SparseIndex, heads: LatentAttention, config: ConfigJson) -> tuple[Part, ...]:
    """Return the parts of the indexer: query projection (from the latent queries), key projection with layer norm, and head weights."""
    if heads.q_lora_rank is None:
        raise config.contradiction("sparse attention needs q_lora_rank: the indexer reads the latent queries")
    hidden_size = config.count("hidden_size")
    projections = heads.q_lora_rank * index.num_heads * index.head_dim + hidden_size * index.head_dim
    return (
        matrix(PartKind.INDEXER, projections, Split.REPLICATED),
        matrix(PartKind.INDEXER, hidden_size * index.num_heads, Split.REPLICATED, quantizable=False),
        vector(PartKind.INDEXER, 2 * index.head_dim),
    )


WHY_NOT_TRANSFORMERS = "its attention is sparse, which neither the torch trainer nor the embedded engine computes"

FAMILY = Family(
    architecture=architecture,
    names=names,
    why_not_transformers=WHY_NOT_TRANSFORMERS,
    model_args=ModelArgs(is_latent=True, needs_experts=True),
)
