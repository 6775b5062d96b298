"""What a model consists of, as numbers: parameters by kind, layer by layer, and how each kind is split over ranks. Pure Python.

A family's folder turns its `config.json` into an `Architecture`; the planner, the Megatron trainer and the exporter read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """How the ranks of a trainer or engine share a part."""

    TENSOR = "tensor"
    """Each tensor-parallel rank holds its share (attention and dense matrices; the vocabulary of embedding and head)."""
    EXPERT = "expert"
    """Each expert-parallel rank holds whole experts; expert-tensor-parallel ranks share each of them."""
    REPLICATED = "replicated"
    """Every rank of the stage holds all (norms, routers, the latent down-projections of MLA)."""


class PartKind(StrEnum):
    """What a part does."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    INDEXER = "indexer"
    """Of sparse attention (DSA): chooses the tokens to attend to."""
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERTS = "routed_experts"
    MTP_PROJECTION = "mtp_projection"
    """`eh_proj`: joins the embedding of the next token and the hidden state of a multi-token-prediction layer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters of one kind that are split alike."""

    kind: PartKind
    num_parameters: int
    split: Split
    quantisable: bool
    """Stored in FP8 in a block-quantised checkpoint (norms, embeddings, heads, routers, `eh_proj` are not)."""
    is_matmul: bool = True
    """Each parameter costs two floating-point operations a token forward (norms and the embedding's lookup do not)."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Multi-head attention with grouped keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of keys and values that the cache of one layer holds for one token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one compressed vector a token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that the cache of one layer holds for one token; not split over tensor-parallel ranks."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """The indexer of DeepSeek sparse attention (DeepSeek-V3.2): top-k tokens a query, shared by the layers that do not compute."""

    num_heads: int
    head_dim: int
    top_k: int
    rotary_interleaved: bool = False
    """Neighbouring elements of a head are rotated as pairs; else an element of the first half with one of the second."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a mixture-of-experts layer."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    """Of one routed expert."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer, or one multi-token-prediction layer."""

    number: int
    """Counted from 0; prediction layers follow the others, as in the checkpoint."""
    parts: tuple[Part, ...]
    is_moe: bool
    computes_index: bool = False
    """Sparse attention: computes its own token choice (the others reuse that of the nearest such layer below)."""
    num_buffer_elements: int = 0
    """Stored with the layer and not trained by gradients: the correction bias of the router's scores, one a routed expert (float32).
    Not part of `num_parameters`, as in transformers."""

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A causal language model."""

    model_type: str
    """As in config.json."""
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    """Of a dense MLP."""
    max_position_embeddings: int
    tied_embeddings: bool
    attention: GroupedAttention | LatentAttention
    experts: Experts | None
    sparse_index: SparseIndex | None
    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...]
    """Shipped with the checkpoint; not part of `num_parameters`."""
    embedding: Part
    head: Part | None
    """None where the embedding is the head too."""
    final_norm: Part
    is_quantised: bool
    """config.json has a quantization_config: the checkpoint stores FP8."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """All parameters of the model without its multi-token-prediction layers."""
        return sum(layer.num_parameters for layer in self.layers) + sum(part.num_parameters for part in self.outer_parts)

    @property
    def num_mtp_parameters(self) -> int:
        """Parameters of the multi-token-prediction layers (their embedding and head are the model's)."""
        return sum(layer.num_parameters for layer in self.mtp_layers)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in one token's forward pass: of the routed experts only the chosen; embedding and head counted."""
        return sum(self.active(part) for layer in self.layers for part in layer.parts) + sum(
            part.num_parameters for part in self.outer_parts
        )

    @property
    def outer_parts(self) -> tuple[Part, ...]:
        """Embedding, final norm and, where it has weights of its own, the head."""
        return tuple(part for part in (self.embedding, self.final_norm, self.head) if part is not None)

    def active(self, part: Part) -> int:
        """Parameters of `part` that one token uses."""
        if part.kind is not PartKind.ROUTED_EXPERTS:
            return part.num_parameters
        assert self.experts is not None
        return part.num_parameters // self.experts.num_experts * self.experts.num_experts_per_token
