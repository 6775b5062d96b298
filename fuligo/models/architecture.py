"""Architecture of a model: shapes, and parameter counts by layer and kind with their split over ranks. Imports neither numpy nor torch.

A family's module turns `config.json` into an `Architecture`; the planner, the Megatron trainer and the converters read it.
"""

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """Split of a part over the ranks of a trainer or engine."""

    TENSOR = "tensor"
    """Each tensor-parallel rank holds its share (attention and dense matrices; the vocabulary of embedding and head)."""
    EXPERT = "expert"
    """Expert-parallel ranks split the experts; the expert-tensor-parallel ranks of an expert split its matrices."""
    REPLICATED = "replicated"
    """Every rank of the stage holds the whole part (norms, routers, the latent down-projections of MLA)."""


class PartKind(StrEnum):
    """Role of a part in the model."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    """Gated delta rule, in place of attention."""
    INDEXER = "indexer"
    """Indexer, which chooses the tokens to attend to in sparse attention (DSA)."""
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERTS = "routed_experts"
    LAYER_INPUT = "layer_input"
    """Projections of per-layer embeddings (Gemma 4); the embedding table itself is of kind `EMBEDDING`."""
    VISION_TOWER = "vision_tower"
    MTP_PROJECTION = "mtp_projection"
    """`eh_proj` of an MTP (multi-token prediction) layer: joins the embedding of the next token and the hidden state."""


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that have the same kind and split."""

    kind: PartKind
    num_parameters: int
    split: Split
    quantizable: bool
    """True if it is stored in FP8 in a block-quantized checkpoint (norms, embeddings, heads, routers, `eh_proj` are not)."""
    is_matmul: bool = True
    """True if each parameter costs two FLOPs per token in the forward pass (norms and the embedding lookup do not)."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Multi-head attention with grouped keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_head_norms: bool = False
    """True if queries and keys are normalized, each head separately unless `norms_span_heads`."""
    has_output_gate: bool = False
    """True if the query projection also computes a gate for each head's output."""
    has_sinks: bool = False
    """True if each head has a learned logit in the denominator of its softmax."""
    norms_span_heads: bool = False
    """True if queries and keys are normalized over all heads together."""
    norms_values: bool = False
    """True if values are normalized too, each head separately and without weights."""
    has_value_projection: bool = True
    """False: the keys before their norm are also the values."""
    borrows_keys: bool = False
    """True if the layer reads the keys and values of an earlier layer, and neither projects nor caches its own."""

    @property
    def kv_elements_per_token(self) -> int:
        """Number of elements per token in the KV cache of one layer."""
        return 0 if self.borrows_keys else self.reserved_kv_elements

    @property
    def reserved_kv_elements(self) -> int:
        """Number of elements of keys and values per token of a layer, even if it borrows them."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def projected_kv_elements(self) -> int:
        """Number of elements per token that the layer's key and value projections compute; 0 if it borrows them."""
        return 0 if self.borrows_keys else (1 + self.has_value_projection) * self.num_kv_heads * self.head_dim

    @property
    def normed_elements(self) -> int:
        """Number of elements of queries and keys per token that pass through norms with weights."""
        return (self.num_heads + (0 if self.borrows_keys else self.num_kv_heads)) * self.head_dim if self.has_head_norms else 0

    @property
    def normed_value_elements(self) -> int:
        """Number of elements of values per token that pass through norms, which have no weights."""
        return self.num_kv_heads * self.head_dim if self.norms_values and not self.borrows_keys else 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); the cache holds one compressed vector per token."""

    num_heads: int
    q_lora_rank: int | None
    """Size of the latent queries; None if queries are computed directly from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def kv_elements_per_token(self) -> int:
        """Number of elements per token in the cache of one layer; replicated on tensor-parallel ranks."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta rule (arXiv 2412.06464) with a short convolution; a request keeps one state per layer, whatever its length."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    has_fused_inputs: bool
    """True for two projections of the input, `in_proj_qkvz` and `in_proj_ba`, instead of four."""

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: the queries, keys and values of one token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Number of elements of the state per request and layer: one matrix [key_dim, value_dim] per value head."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def window_elements(self) -> int:
        """Number of elements of the cached convolution inputs per request and layer."""
        return self.num_channels * (self.conv_width - 1)


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """Indexer of DeepSeek sparse attention (DeepSeek-V3.2): chooses top-k tokens for each query; layers without an indexer reuse them."""

    num_heads: int
    head_dim: int
    top_k: int
    rotary_interleaved: bool = False
    """True if rotary pairs are adjacent elements of a head; False: elements i and i + head_dim / 2."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of the experts of a mixture-of-experts layer."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    """Width of one routed expert."""
    has_shared_gate: bool = False
    """True if the output of the shared expert is scaled by a gate."""
    has_softmax_router: bool = False
    """True if the router's scores are a softmax over the experts; False: sigmoids."""


class Activation(StrEnum):
    """Activation of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Numerics:
    """Numerics of a family's layers that the shapes do not determine."""

    activation: Activation = Activation.SILU
    norms_outputs: bool = False
    """True if the outputs of attention and MLP are also normalized, before the residual addition."""
    norms_around_zero: bool = False
    """True if norms multiply by one plus their weight."""
    scales_in_float32: bool = False
    """True if norms multiply by their weight in float32, before the result is rounded."""
    embedding_scale: float = 1.0
    """Factor by which embeddings are multiplied before the first layer."""
    softmax_scale: float | None = None
    """Factor of attention scores; None: head_dim ** -0.5."""
    rotary_share: float = 1.0
    """Rotated fraction of a head if config.json has no partial_rotary_factor."""
    rotary_interleaved: bool = False
    """True if rotary pairs are adjacent elements of the rotated part of a head; False: one element of its first half and one of its second
    half."""
    rotary_base: float = 10_000
    """Rotary base if config.json has none."""
    window_rotary_base: float | None = None
    """Rotary base of layers with a sliding window; None: that of the other layers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Transformer layer or MTP layer."""

    number: int
    """Index of the layer, from 0; MTP layers follow the others, as in the checkpoint."""
    parts: tuple[Part, ...]
    is_moe: bool
    computes_index: bool = False
    """True if the layer has an indexer for sparse attention. Layers without one reuse the token choice of the nearest layer below that has
    one."""
    num_buffer_elements: int = 0
    """Number of float32 elements that are stored but have no gradients: the router's correction bias, one per routed expert. Not part of
    `num_parameters`, as in transformers."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all tokens up to it."""
    attention: GroupedAttention | None = None
    """Attention of this layer if layers differ; None: `Architecture.attention`."""
    dense_size: int | None = None
    """Width of the layer's dense MLP if layers differ, or if an MoE layer also has a dense MLP. None: `Architecture.intermediate_size`; in
    an MoE layer, no dense MLP."""
    input_size: int = 0
    """Width of the layer's per-layer embeddings (Gemma 4); 0: it has none."""

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def is_linear(self) -> bool:
        """True if the layer has linear attention in place of softmax attention."""
        return any(part.kind is PartKind.LINEAR_ATTENTION for part in self.parts)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of a causal language model."""

    model_type: str
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    attention: GroupedAttention | LatentAttention
    experts: Experts | None
    """Experts of the MoE layers; None for a dense model."""
    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...]
    """MTP layers of the checkpoint; not part of `num_parameters`."""
    embedding: Part
    head: Part | None
    """Output layer; None where it is tied to the embedding."""
    final_norm: Part
    is_quantized: bool
    """True if the checkpoint's matrices are stored in FP8, as assumed for every quantization_config in config.json except MXFP4's."""
    sparse_index: SparseIndex | None = None
    """Indexer of sparse attention (DSA); None without one."""
    linear_attention: LinearAttention | None = None
    """Sizes of the layers with linear attention; None: all layers have `attention`."""
    is_mxfp4: bool = False
    """True if the checkpoint stores the routed experts in MXFP4: four bits per weight, and an eight-bit scale per 32 weights."""
    numerics: Numerics = Numerics()
    layer_inputs: tuple[Part, ...] = ()
    """Per-layer embeddings (Gemma 4) of all layers together, with their projection and norm."""
    vision_tower: Part | None = None
    """All weights that turn images or sounds into embeddings; None for a text-only model."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_linear_layers(self) -> int:
        return sum(layer.is_linear for layer in self.layers)

    @property
    def num_cached_layers(self) -> int:
        return self.num_layers - self.num_linear_layers

    def attention_of(self, layer: Layer) -> GroupedAttention | LatentAttention:
        """Return the attention of a layer, which must not be linear."""
        return layer.attention or self.attention

    def dense_size_of(self, layer: Layer) -> int:
        """Return the width of a layer's dense MLP; 0 if it has experts instead."""
        if layer.dense_size is not None:
            return layer.dense_size
        return 0 if layer.is_moe else self.intermediate_size

    @property
    def grouped_attentions(self) -> tuple[GroupedAttention, ...]:
        """Distinct attention shapes of the layers; empty with latent attention."""
        found = (self.attention_of(layer) for layer in self.layers if not layer.is_linear)
        return tuple(dict.fromkeys(heads for heads in found if isinstance(heads, GroupedAttention)))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, towers included, without MTP layers."""
        return sum(layer.num_parameters for layer in self.layers) + sum(part.num_parameters for part in self.outer_parts)

    @property
    def num_mtp_parameters(self) -> int:
        """Number of parameters of the MTP layers, which share the model's embedding and head."""
        return sum(layer.num_parameters for layer in self.mtp_layers)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters used in one token's forward pass: all except those of the routed experts that are not chosen."""
        return sum(self.active(part) for layer in self.layers for part in layer.parts) + sum(
            part.num_parameters for part in self.outer_parts
        )

    @property
    def outer_parts(self) -> tuple[Part, ...]:
        """Embeddings, final norm and, unless tied, the head; the vision tower, if there is one."""
        parts = (self.embedding, *self.layer_inputs, self.final_norm, self.head, self.vision_tower)
        return tuple(part for part in parts if part is not None)

    def active(self, part: Part) -> int:
        """Return the number of parameters of `part` that one token uses: of routed experts, only the chosen ones'."""
        if part.kind is not PartKind.ROUTED_EXPERTS:
            return part.num_parameters
        assert self.experts is not None
        return part.num_parameters // self.experts.num_experts * self.experts.num_experts_per_token
