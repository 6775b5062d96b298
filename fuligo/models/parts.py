"""Builders that the families share: the parts of attention, of dense and expert MLPs, of prediction layers. Pure Python.

Counts follow transformers 5.12.1 (`modeling_<family>.py`), splits follow Megatron-Core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fuligo.models.architecture import Architecture, Experts, GroupedAttention, LatentAttention, Layer, Part, PartKind, SparseIndex, Split
from fuligo.models.config_json import ConfigJson

Parts = tuple[Part, ...]


def matrix(kind: PartKind, num_parameters: int, split: Split, quantisable: bool = True) -> Part:
    """Weights that tokens are multiplied by."""
    return Part(kind, num_parameters, split, quantisable)


def vector(kind: PartKind, num_parameters: int, split: Split = Split.REPLICATED) -> Part:
    """Biases and norm weights: never quantised, no matrix product."""
    return Part(kind, num_parameters, split, quantisable=False, is_matmul=False)


def norms(num_parameters: int) -> Part:
    """Weights of one or several norms."""
    return vector(PartKind.NORM, num_parameters)


def read_grouped_attention(config: ConfigJson, *, default_head_dim: int | None = None, may_omit_kv_heads: bool = False) -> GroupedAttention:
    """Heads of multi-head attention.

    Args:
        default_head_dim: where `head_dim` is not given; None: hidden_size / num_attention_heads.
        may_omit_kv_heads: without `num_key_value_heads` there are as many as heads (transformers fills in a number of its own elsewhere).

    Raises:
        ConfigError: the key-value heads do not divide the heads, or the heads the hidden size that head_dim follows from.
    """
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default=num_heads if may_omit_kv_heads else None)
    if num_heads % num_kv_heads:
        raise config.contradiction(f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = config.optional_count("head_dim") or default_head_dim
    if head_dim is None:
        hidden_size = config.count("hidden_size")
        if hidden_size % num_heads:
            raise config.contradiction(f"no head_dim, and num_attention_heads {num_heads} does not divide hidden_size {hidden_size}")
        head_dim = hidden_size // num_heads
    return GroupedAttention(num_heads, num_kv_heads, head_dim)


def grouped_attention_parts(
    attention: GroupedAttention, hidden_size: int, *, qkv_bias: bool, output_bias: bool = False, qk_norm: bool = False
) -> Parts:
    """Query, key, value and output projections; norms over the head dimension of queries and keys where `qk_norm`."""
    q_size = attention.num_heads * attention.head_dim
    qkv_size = q_size + 2 * attention.num_kv_heads * attention.head_dim
    parts = [matrix(PartKind.ATTENTION, hidden_size * (qkv_size + q_size), Split.TENSOR)]
    if qkv_bias:
        parts.append(vector(PartKind.ATTENTION, qkv_size, Split.TENSOR))
    if output_bias:
        parts.append(vector(PartKind.ATTENTION, hidden_size))
    if qk_norm:
        parts.append(norms(2 * attention.head_dim))
    return tuple(parts)


def read_latent_attention(config: ConfigJson) -> LatentAttention:
    """Sizes of multi-head latent attention; `q_lora_rank` null: queries are projected directly.

    Raises:
        ConfigError: qk_head_dim is not the sum of its two parts.
    """
    has_latent_queries = "q_lora_rank" not in config.values or config.values["q_lora_rank"] is not None
    attention = LatentAttention(
        num_heads=config.count("num_attention_heads"),
        q_lora_rank=config.count("q_lora_rank") if has_latent_queries else None,
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
    )
    total = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    given = config.count("qk_head_dim", default=total)
    if given != total:
        raise config.contradiction(f"qk_head_dim {given} is not qk_nope_head_dim + qk_rope_head_dim = {total}")
    return attention


def latent_attention_parts(attention: LatentAttention, hidden_size: int, *, bias: bool) -> Parts:
    """Down-projections (every rank has all), their norms, up-projections and output projection (split by heads)."""
    q_size = attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    latent_size = attention.kv_lora_rank + attention.qk_rope_head_dim
    up = attention.kv_lora_rank * attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    output = attention.num_heads * attention.v_head_dim * hidden_size
    rank = attention.q_lora_rank
    if rank is None:
        down_size, q_up, norm_size = latent_size, hidden_size * q_size, attention.kv_lora_rank
    else:
        down_size, q_up, norm_size = rank + latent_size, rank * q_size, rank + attention.kv_lora_rank
    parts = (
        matrix(PartKind.ATTENTION, hidden_size * down_size, Split.REPLICATED),
        matrix(PartKind.ATTENTION, q_up + up + output, Split.TENSOR),
        norms(norm_size),
    )
    return (*parts, vector(PartKind.ATTENTION, down_size + hidden_size)) if bias else parts


def dense_mlp_parts(hidden_size: int, intermediate_size: int, *, bias: bool = False) -> Parts:
    """Gate, up and down projection."""
    weights = matrix(PartKind.DENSE_MLP, 3 * hidden_size * intermediate_size, Split.TENSOR)
    if not bias:
        return (weights,)
    return weights, vector(PartKind.DENSE_MLP, 2 * intermediate_size, Split.TENSOR), vector(PartKind.DENSE_MLP, hidden_size)


def read_experts(config: ConfigJson, *, num_experts_key: str = "n_routed_experts", shared: bool = True) -> Experts:
    """Sizes of the routed and shared experts.

    Raises:
        ConfigError: more experts a token than there are, or groups that do not divide them.
    """
    experts = Experts(
        num_experts=config.count(num_experts_key),
        num_experts_per_token=config.count("num_experts_per_tok"),
        num_shared_experts=config.index("n_shared_experts", default=1) if shared else 0,
        intermediate_size=config.count("moe_intermediate_size"),
    )
    if experts.num_experts_per_token > experts.num_experts:
        raise config.contradiction(f"num_experts_per_tok {experts.num_experts_per_token} exceeds {num_experts_key} {experts.num_experts}")
    num_groups = config.count("n_group", default=1)
    if experts.num_experts % num_groups:
        raise config.contradiction(f"n_group {num_groups} does not divide {num_experts_key} {experts.num_experts}")
    if config.count("topk_group", default=1) > num_groups:
        raise config.contradiction(f"topk_group {config.count('topk_group')} exceeds n_group {num_groups}")
    return experts


def expert_mlp_parts(experts: Experts, hidden_size: int) -> Parts:
    """Router, routed experts and, where there are any, the shared expert (one MLP as wide as all shared experts)."""
    expert = 3 * hidden_size * experts.intermediate_size
    parts = (
        matrix(PartKind.ROUTER, experts.num_experts * hidden_size, Split.REPLICATED, quantisable=False),
        matrix(PartKind.ROUTED_EXPERTS, experts.num_experts * expert, Split.EXPERT),
    )
    if not experts.num_shared_experts:
        return parts
    return (*parts, matrix(PartKind.SHARED_EXPERT, experts.num_shared_experts * expert, Split.TENSOR))


def dense_layer(number: int, attention: Parts, hidden_size: int, mlp: Parts, num_norms: int = 2) -> Layer:
    """A layer with a dense MLP."""
    return Layer(number, (*attention, *mlp, norms(num_norms * hidden_size)), is_moe=False)


def moe_layer(number: int, attention: Parts, hidden_size: int, experts: Experts, *, correction_bias: bool) -> Layer:
    """A layer with routed experts; `correction_bias`: the router adds one to its scores (DeepSeek-V3's loss-free balancing)."""
    parts = (*attention, *expert_mlp_parts(experts, hidden_size), norms(2 * hidden_size))
    return Layer(number, parts, is_moe=True, num_buffer_elements=experts.num_experts if correction_bias else 0)


def prediction_layer(layer: Layer, hidden_size: int) -> Layer:
    """A multi-token-prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) around `layer`.

    It adds two norms of what it joins, the joining projection, and the norm before the head.
    """
    projection = matrix(PartKind.MTP_PROJECTION, 2 * hidden_size * hidden_size, Split.TENSOR, quantisable=False)
    return replace(layer, parts=(*layer.parts, projection, norms(3 * hidden_size)))


def assemble(
    config: ConfigJson,
    attention: GroupedAttention | LatentAttention,
    layers: Iterable[Layer],
    mtp_layers: Iterable[Layer] = (),
    experts: Experts | None = None,
    sparse_index: SparseIndex | None = None,
) -> Architecture:
    """An architecture with the embedding, final norm and head that all families have."""
    hidden_size, vocab_size = config.count("hidden_size"), config.count("vocab_size")
    tied = config.switch("tie_word_embeddings", default=False)
    return Architecture(
        model_type=config.model_type,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        intermediate_size=config.count("intermediate_size"),
        max_position_embeddings=config.count("max_position_embeddings"),
        tied_embeddings=tied,
        attention=attention,
        experts=experts,
        sparse_index=sparse_index,
        layers=tuple(layers),
        mtp_layers=tuple(mtp_layers),
        embedding=Part(PartKind.EMBEDDING, vocab_size * hidden_size, Split.TENSOR, quantisable=False, is_matmul=False),
        head=None if tied else matrix(PartKind.HEAD, vocab_size * hidden_size, Split.TENSOR, quantisable=False),
        final_norm=norms(hidden_size),
        is_quantised=config.is_quantised,
    )
