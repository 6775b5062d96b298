"""Activations of the Megatron trainer.

The accounting follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4): bytes per token, bf16, that each operation keeps for its
backward pass. It is adapted to current layers: flash attention keeps a log-sum-exp instead of scores, there is no dropout, norms are
RMSNorm, MLPs are gated (three widths instead of two), attention is grouped or latent, and experts see top-k copies of tokens.
"""

import math
from dataclasses import dataclass, replace

from fuligo.config import Config
from fuligo.layout.adapter import AdapterShape, InputOf, TensorSplit
from fuligo.layout.megatron import Layout
from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention, Layer, PartKind
from fuligo.planner.lengths import copied_keys_per_token

BF16 = 2
FP32 = 4
FP8 = 1 + 4 / 128
"""Bytes of an element in FP8 with the share of its block's scale."""
INDEX = 4
"""Bytes of the index (int32) of one token that sparse attention selects."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Activation bytes per token of one layer on one rank."""

    stored: float
    """Bytes kept from the forward pass for the backward pass, after selective recomputation."""
    whole: float
    """Bytes kept without recomputation; with it, in memory only while the layer's backward pass runs."""
    entry: float
    """The layer's input, which is all that full recomputation keeps."""
    passing: float
    """Peak of gradients and gathered tensors during the layer's backward pass."""


def layer_bytes(layer: Layer, architecture: Architecture, shape: Layout, config: Config, adapter: AdapterShape | None = None) -> LayerBytes:
    """Return the bytes per token of `layer`'s activations on one rank.

    Matrices below an adapter are frozen: they keep no input for their own gradient, but the adapter's A may need it for its gradient.
    """
    hidden, split = architecture.hidden_size, shape.shards_sequence
    # In FP8, matrices keep their inputs as they multiply them. Attention keeps its output in bf16. Measured for dense layers only.
    input_bytes = FP8 if config.megatron.get("fp8_format") is not None and not layer.is_moe else BF16
    normed = 2 * input_bytes * hidden / split
    norms = (2 + num_output_norms(layer, hidden)) * BF16 * hidden / split
    copied = BF16 * copied_elements(layer, architecture, shape, config)
    attention = _attention(architecture, shape) + copied + BF16 * normed_head_elements(layer, architecture) / shape.tp
    added = None if adapter is None else _adapter(layer, adapter, shape)
    if added is not None:
        if isinstance(latent := architecture.attention, LatentAttention):  # only the matrices that read normed latents keep them
            attention -= BF16 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank)
        attention += added.attention
        normed = added.norm_outputs
    # The chosen tokens, replicated over tensor-parallel ranks. The indexer itself has no gradient.
    index = INDEX * architecture.sparse_index.top_k if layer.computes_index and architecture.sparse_index else 0
    gathers = config.parallel.moe_token_dispatcher_type == "allgather"
    trains_experts = adapter is None or adapter.adapts_experts(layer)
    mlp = _mlp(
        layer, architecture, shape, gathers=gathers, is_frozen=added is not None, trains_experts=trains_experts, input_bytes=input_bytes
    )
    if added is not None:
        mlp = replace(mlp, kept=mlp.kept + added.mlp)
    whole = norms + normed + attention + index + mlp.kept
    entry = BF16 * hidden / split + index
    gathered = 2 * BF16 * hidden if split > 1 else 0
    return LayerBytes(
        stored=whole - _dropped_by_modules(config, architecture, shape, mlp, normed, copied),
        whole=whole,
        entry=entry,
        passing=mlp.passing + gathered + _context_parallel(architecture, shape, config) + 2 * BF16 * hidden / split,
    )


def copied_elements(layer: Layer, architecture: Architecture, shape: Layout, config: Config, *, num_bytes: int = BF16) -> float:
    """Return the number of copied key and value elements per token of a row that a layer keeps, because responses share a prompt.

    In bf16 (`num_bytes` per element), grouped heads without sinks keep none: their kernel copies them again in the backward pass.
    """
    attention = architecture.attention_of(layer)
    if num_bytes == BF16 and isinstance(attention, GroupedAttention) and not attention.has_sinks:
        return 0.0
    return copied_keys_per_token(config, shape) * _key_value_elements(attention, shape)


def _key_value_elements(attention: GroupedAttention | LatentAttention, shape: Layout) -> float:
    """Return the elements of keys and values of one token on one rank, as attention reads them."""
    if isinstance(attention, GroupedAttention):
        return 2 * max(1.0, attention.num_kv_heads / shape.tp) * attention.head_dim
    return attention.num_heads / shape.tp * (attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim)


def num_output_norms(layer: Layer, hidden_size: int) -> int:
    """Return the number of norms besides those before attention and MLP (GLM-4 has norms after them, too); each keeps only its input."""
    sizes = [part.num_parameters for part in layer.parts if part.kind is PartKind.NORM]
    return max(0, sum(size // hidden_size for size in sizes if size % hidden_size == 0) - 2)


def normed_head_elements(layer: Layer, architecture: Architecture) -> int:
    """Return the elements of queries and keys per token if these have norms (Qwen3), which keep their inputs; else 0."""
    attention = architecture.attention_of(layer)
    return attention.normed_elements if isinstance(attention, GroupedAttention) and not layer.is_linear else 0


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Bytes per token, on one rank, of a dense MLP or of a layer's router and experts."""

    kept: float
    activated: float
    """Part of `kept`: outputs of the gate, which `moe_act` recomputes."""
    passing: float


def _mlp(
    layer: Layer, architecture: Architecture, shape: Layout, *,
    gathers: bool, is_frozen: bool, trains_experts: bool, input_bytes: float,
) -> _Mlp:  # fmt: skip
    """Return the bytes per token of the dense MLP, or of router, shared expert and routed experts.

    If the dispatcher `gathers`, each rank of the expert group has every token of the group. Frozen matrices keep no inputs. The matrices
    of experts do if they, or their adapters, are trained (`trains_experts`). A dense MLP keeps the input of its last matrix, with
    `input_bytes` per element.
    """
    hidden, experts = architecture.hidden_size, architecture.experts
    widths = 2 if is_frozen else 3
    if not layer.is_moe or experts is None:
        width = architecture.intermediate_size / shape.tp
        activated = (widths - 2) * input_bytes * width
        return _Mlp(kept=2 * BF16 * width + activated, activated=activated, passing=3 * BF16 * width)
    copies = experts.num_experts_per_token * shape.etp / shape.shards_sequence
    width = experts.intermediate_size / shape.etp
    shared = experts.num_shared_experts * experts.intermediate_size / shape.tp
    router = 2 * FP32 * experts.num_experts / shape.shards_sequence
    routed, inputs = (3, hidden) if trains_experts else (2, 0)
    return _Mlp(
        kept=copies * BF16 * (inputs + routed * width) + widths * BF16 * shared + router,
        activated=(routed - 2) * copies * BF16 * width,
        passing=copies * BF16 * (2 * hidden + 3 * width)
        + (2 * BF16 * hidden * shape.ep * shape.etp / shape.shards_sequence if gathers else 0),
    )


def _attention(architecture: Architecture, shape: Layout) -> float:
    """Return the bytes per token of queries, keys, values, output and log-sum-exp; with latent attention also of the latents."""
    attention = architecture.attention
    if isinstance(attention, GroupedAttention):
        query = attention.num_heads * attention.head_dim / shape.tp
        key_value = max(1.0, attention.num_kv_heads / shape.tp) * attention.head_dim
        return BF16 * (2 * query + 2 * key_value) + FP32 * attention.num_heads / shape.tp
    heads = attention.num_heads / shape.tp
    if architecture.sparse_index is not None:
        return _absorbed_attention(attention, shape)
    query_key = 2 * heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    value_output = 2 * heads * attention.v_head_dim
    latent = 2 * ((attention.q_lora_rank or 0) + attention.kv_lora_rank) + attention.qk_rope_head_dim
    return BF16 * (query_key + value_output + latent) + FP32 * heads


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Bytes per token that an adapter keeps in addition to the base matrices: inputs of A (once per distinct input) and outputs of A."""

    norm_outputs: float = 0.0
    """Outputs of the norms before attention and MLP."""
    attention: float = 0.0
    mlp: float = 0.0


def _adapter(layer: Layer, adapter: AdapterShape, shape: Layout) -> _Adapter:
    found: dict[InputOf, float] = {}
    hidden = {"attention": 0.0, "mlp": 0.0}
    for matrix in adapter.adapted(layer):
        found[matrix.source] = BF16 * matrix.inputs / (shape.tp if matrix.split is TensorSplit.INPUTS else shape.shards_sequence)
        # If the matrix is split by outputs, every rank has A's output for all tokens.
        shards = 1 if matrix.split is TensorSplit.OUTPUTS else shape.shards_sequence
        hidden["mlp" if matrix.source in (InputOf.MLP, InputOf.DOWN) else "attention"] += BF16 * adapter.config.rank / shards
    experts = adapter.architecture.experts
    if experts is not None and adapter.adapts_experts(layer):  # outputs of the A of both matrices, padded for grouped products
        copies = experts.num_experts_per_token * shape.etp / shape.shards_sequence
        hidden["mlp"] += 2 * BF16 * copies * (adapter.config.rank + -adapter.config.rank % 8)
    latents = found.get(InputOf.LATENT_QUERY, 0.0) + found.get(InputOf.LATENT_KEY_VALUE, 0.0)
    return _Adapter(
        norm_outputs=found.get(InputOf.ATTENTION, 0.0) + found.get(InputOf.MLP, 0.0),
        attention=latents + hidden["attention"],  # attention itself keeps its output, which `o_proj` reads
        mlp=found.get(InputOf.DOWN, 0.0) + hidden["mlp"],
    )


def _absorbed_attention(attention: LatentAttention, shape: Layout) -> float:
    """Return the bytes per token of sparse latent attention, whose scores are recomputed.

    It keeps queries and outputs of each head before and after the absorbed projections, their latents, and the latents of the whole row.
    """
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    query = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    per_head = query + latent + attention.kv_lora_rank + attention.v_head_dim
    compressed = 2 * ((attention.q_lora_rank or 0) + attention.kv_lora_rank) + attention.qk_rope_head_dim
    return BF16 * (attention.num_heads / shape.tp * per_head + compressed / shape.shards_sequence + shape.cp * latent)


def _context_parallel(architecture: Architecture, shape: Layout, config: Config) -> float:
    """Return the bytes per token for other ranks' keys and values, with gradients.

    A rank holds those of all ranks with --allgather-cp or shared prefixes, else those of two, in buffers.
    """
    if shape.cp == 1:
        return 0
    attention = architecture.attention
    num_ranks = shape.cp if config.parallel.allgather_cp or config.shares_prefixes else 2
    elements = _key_value_elements(attention, shape)
    if not isinstance(attention, GroupedAttention) and config.parallel.allgather_cp:
        elements = attention.kv_elements_per_token + (architecture.sparse_index.head_dim if architecture.sparse_index else 0)
    return 2 * BF16 * elements * num_ranks


def _dropped_by_modules(config: Config, architecture: Architecture, shape: Layout, mlp: _Mlp, normed: float, copied: float) -> float:
    """Return the bytes per token that selective recomputation drops (Megatron-Core 0.16.1, `TransformerConfig.recompute_modules`)."""
    if config.parallel.recompute_granularity != "selective":
        return 0
    modules = config.parallel.recompute_modules or ["core_attn"]
    attention = architecture.attention
    heads = attention.num_heads / shape.tp
    dropped = 0.0
    if "core_attn" in modules and architecture.sparse_index is None:
        value_dim = attention.head_dim if isinstance(attention, GroupedAttention) else attention.v_head_dim
        dropped += heads * (BF16 * value_dim + FP32) + copied
    if "layernorm" in modules:
        dropped += normed
    if "mla_up_proj" in modules and not isinstance(attention, GroupedAttention):
        per_head = 2 * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) + attention.v_head_dim
        dropped += BF16 * heads * per_head
    if "mlp" in modules or "moe" in modules:
        return dropped + mlp.kept
    return dropped + (mlp.activated if "moe_act" in modules else 0)


def chunks_in_flight(shape: Layout, pipeline_rank: int, num_micro_batches: int) -> int:
    """Return the largest number of forward passes whose activations a pipeline rank keeps, counting each virtual stage separately.

    As in Megatron-Core (`pipeline_parallel/schedules.get_pp_rank_microbatches`): the passes of the warm-up, and the current one.
    """
    if shape.pp == 1:
        return 1
    if shape.vpp == 1:
        return min(num_micro_batches, shape.pp - pipeline_rank)
    warm_up = 2 * (shape.pp - pipeline_rank - 1) + (shape.vpp - 1) * shape.pp
    return min(num_micro_batches * shape.vpp, warm_up + 1)


def logits_bytes(architecture: Architecture, shape: Layout, chunk_tokens: int) -> int:
    """Return the bytes per GPU of the logits of one chunk (--log-probs-chunk-size tokens).

    Logits in fp32, and gradients in bf16 of this and the previous chunk, each split over the vocabulary.
    """
    return (FP32 + 2 * BF16) * chunk_tokens * math.ceil(architecture.vocab_size / shape.tp)
