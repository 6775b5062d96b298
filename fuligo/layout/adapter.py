"""Matrices of a LoRA adapter and their sizes. Imports neither numpy nor torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention, Layer, LinearAttention, PartKind
from fuligo.models.registry import WHOLE_TYPES, family_of


class InputOf(StrEnum):
    """Activation that is the input of adapted matrices. It is kept for the gradient of A, once for all matrices with this input."""

    ATTENTION = "attention"
    """Output of the norm before attention."""
    LATENT_QUERY = "latent_query"
    LATENT_KEY_VALUE = "latent_key_value"
    OUTPUT = "output"
    """Output of attention, which attention keeps anyway for its backward pass."""
    EMBEDDING = "embedding"
    """Token embedding, which Gemma 4 projects to the width of its per-layer embeddings."""
    LAYER_INPUT = "layer_input"
    """Hidden state from which the gate of the per-layer embedding is computed."""
    GATED_INPUT = "gated_input"
    """Product of the gate and the per-layer embedding."""
    MLP = "mlp"
    """Output of the norm before the MLP."""
    DOWN = "down"
    """Product of the activated gate and the up projection."""


class TensorSplit(Enum):
    """Dimension of a linear layer that the tensor-parallel ranks of the Megatron trainer split."""

    NOTHING = auto()
    OUTPUTS = auto()
    """A is replicated, and B is split."""
    INPUTS = auto()
    """A is split, and B is replicated."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Linear layer that can have an adapter."""

    name: str
    """Name as in `--lora-target-modules`."""
    source: InputOf
    inputs: int
    outputs: int
    block: str
    """Module of the transformer layer that contains the linear layer; empty if it is in no such module."""

    @property
    def split(self) -> TensorSplit:
        if self.name in _REPLICATED:
            return TensorSplit.NOTHING
        return TensorSplit.INPUTS if self.source in (InputOf.OUTPUT, InputOf.DOWN) else TensorSplit.OUTPUTS

    def factors(self, num_tensor_ranks: int) -> int:
        """Return the number of inputs and outputs on one TP rank together: the parameters of A and B per unit of the adapter's rank."""
        inputs = self.inputs // (num_tensor_ranks if self.split is TensorSplit.INPUTS else 1)
        return inputs + self.outputs // (num_tensor_ranks if self.split is TensorSplit.OUTPUTS else 1)


def matrices(layer: Layer, architecture: Architecture) -> Iterator[Matrix]:
    """Yield the linear layers of `layer` that can have an adapter; `models.adapter.linear_layers` finds the same in the model."""
    hidden, heads = architecture.hidden_size, architecture.attention_of(layer)
    if layer.is_linear:
        assert architecture.linear_attention is not None
        yield from _linear(architecture.linear_attention, hidden)
    elif isinstance(heads, GroupedAttention):
        query, key_value = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        yield Matrix("q_proj", InputOf.ATTENTION, hidden, 2 * query if heads.has_output_gate else query, _ATTENTION)
        if not heads.borrows_keys:
            yield Matrix("k_proj", InputOf.ATTENTION, hidden, key_value, _ATTENTION)
        if not heads.borrows_keys and heads.has_value_projection:
            yield Matrix("v_proj", InputOf.ATTENTION, hidden, key_value, _ATTENTION)
        yield Matrix("o_proj", InputOf.OUTPUT, query, hidden, _ATTENTION)
    else:
        yield from _latent(heads, hidden)
    if layer.input_size:
        yield Matrix("per_layer_input_gate", InputOf.LAYER_INPUT, hidden, layer.input_size, "")
        yield Matrix("per_layer_projection", InputOf.GATED_INPUT, layer.input_size, hidden, "")
    if layer.dense_size:
        yield from _gated_mlp(hidden, layer.dense_size, "mlp")
    elif layer.is_moe and architecture.experts is not None:
        has_gate = architecture.experts.has_shared_gate
        if has_gate:
            yield Matrix("shared_expert_gate", InputOf.MLP, hidden, 1, "mlp")
        shared = max((part.num_parameters for part in layer.parts if part.kind is PartKind.SHARED_EXPERT), default=0)
        if shared:
            yield from _gated_mlp(hidden, shared // (3 * hidden), "mlp.shared_expert" if has_gate else "mlp.shared_experts")
    elif family_of(architecture).fuses_gate_up:
        yield Matrix("gate_up_proj", InputOf.MLP, hidden, 2 * architecture.intermediate_size, "mlp")
        yield Matrix("down_proj", InputOf.DOWN, architecture.intermediate_size, hidden, "mlp")
    else:
        yield from _gated_mlp(hidden, architecture.intermediate_size, "mlp")


def _gated_mlp(hidden: int, width: int, block: str) -> Iterator[Matrix]:
    yield Matrix("gate_proj", InputOf.MLP, hidden, width, block)
    yield Matrix("up_proj", InputOf.MLP, hidden, width, block)
    yield Matrix("down_proj", InputOf.DOWN, width, hidden, block)


def _linear(heads: LinearAttention, hidden: int) -> Iterator[Matrix]:
    value = heads.num_value_heads * heads.value_dim
    if heads.has_fused_inputs:
        outputs = {"in_proj_qkvz": heads.num_channels + value, "in_proj_ba": 2 * heads.num_value_heads}
    else:
        steps = dict.fromkeys(("in_proj_b", "in_proj_a"), heads.num_value_heads)
        outputs = {"in_proj_qkv": heads.num_channels, "in_proj_z": value, **steps}
    for name, size in outputs.items():
        yield Matrix(name, InputOf.ATTENTION, hidden, size, "linear_attn")
    yield Matrix("out_proj", InputOf.OUTPUT, value, hidden, "linear_attn")


def _latent(heads: LatentAttention, hidden: int) -> Iterator[Matrix]:
    query = heads.num_heads * (heads.qk_nope_head_dim + heads.qk_rope_head_dim)
    if heads.q_lora_rank is None:
        yield Matrix("q_proj", InputOf.ATTENTION, hidden, query, _ATTENTION)
    else:
        yield Matrix("q_a_proj", InputOf.ATTENTION, hidden, heads.q_lora_rank, _ATTENTION)
        yield Matrix("q_b_proj", InputOf.LATENT_QUERY, heads.q_lora_rank, query, _ATTENTION)
    yield Matrix("kv_a_proj_with_mqa", InputOf.ATTENTION, hidden, heads.kv_lora_rank + heads.qk_rope_head_dim, _ATTENTION)
    key_value = heads.num_heads * (heads.qk_nope_head_dim + heads.v_head_dim)
    yield Matrix("kv_b_proj", InputOf.LATENT_KEY_VALUE, heads.kv_lora_rank, key_value, _ATTENTION)
    yield Matrix("o_proj", InputOf.OUTPUT, heads.num_heads * heads.v_head_dim, hidden, _ATTENTION)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Matrices that a run's LoRA adapter adds to a model, and their parameter counts."""

    config: AdapterConfig
    architecture: Architecture

    def adapted(self, layer: Layer) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in matrices(layer, self.architecture) if self.config.adapts(self._path(layer, matrix)))

    @property
    def adapted_outside(self) -> tuple[Matrix, ...]:
        """Adapted matrices outside of the layers: the projection of token embeddings to per-layer embeddings (Gemma 4)."""
        return tuple(matrix for matrix in self._outside if self.config.adapts(f"{self._root}.{matrix.name}"))

    @property
    def names(self) -> tuple[str, ...]:
        """Last parts of the names of all adapted matrices."""
        inside = {matrix.name for layer in self.architecture.layers for matrix in self.adapted(layer)}
        return tuple(sorted(inside | {matrix.name for matrix in self.adapted_outside}))

    @property
    def layers(self) -> tuple[str, ...]:
        """Full names of all linear layers that can have an adapter, as in the Hugging Face model."""
        inside = (self._path(layer, matrix) for layer in self.architecture.layers for matrix in matrices(layer, self.architecture))
        return *inside, *(f"{self._root}.{matrix.name}" for matrix in self._outside)

    @property
    def widest(self) -> int:
        """Largest number of inputs or outputs of a linear layer that can have an adapter; no update can have a higher rank."""
        inside = (matrix for layer in self.architecture.layers for matrix in matrices(layer, self.architecture))
        return max(max(matrix.inputs, matrix.outputs) for matrix in (*inside, *self._outside))

    def adapts_experts(self, layer: Layer) -> bool:
        return self.config.adapts_experts and layer.is_moe

    def layer_parameters(self, layer: Layer) -> int:
        """Return the number of parameters of A [rank, inputs] and B [outputs, rank] of a layer's adapted matrices, experts included."""
        return self.dense_parameters(layer) + self.experts_parameters(layer)

    def dense_parameters(self, layer: Layer, num_tensor_ranks: int = 1) -> int:
        """Return the number of parameters of A and B of a layer's adapted matrices without experts, on one TP rank."""
        return self.config.rank * sum(matrix.factors(num_tensor_ranks) for matrix in self.adapted(layer))

    def experts_parameters(self, layer: Layer, num_expert_ranks: int = 1, num_sharing: int = 1) -> int:
        """Return the number of parameters of A and B of a layer's experts on one rank; 0 if they are not adapted.

        The experts are distributed over `num_expert_ranks`. `num_sharing` ranks split the intermediate size of each; factors of the hidden
        size are replicated.
        """
        experts = self.architecture.experts
        if experts is None or not self.adapts_experts(layer):
            return 0
        widths = 2 * self.architecture.hidden_size + 3 * experts.intermediate_size // num_sharing  # gate and up are one matrix
        return self.config.rank * experts.num_experts // num_expert_ranks * widths

    @property
    def num_parameters(self) -> int:
        outside = self.config.rank * sum(matrix.inputs + matrix.outputs for matrix in self.adapted_outside)
        return outside + sum(self.layer_parameters(layer) for layer in self.architecture.layers)

    @property
    def _root(self) -> str:
        """Name of the module that contains the layers: the language model in a model with towers."""
        return "model.language_model" if self.architecture.model_type in WHOLE_TYPES else "model"

    @property
    def _outside(self) -> tuple[Matrix, ...]:
        width = sum(layer.input_size for layer in self.architecture.layers)
        return (Matrix("per_layer_model_projection", InputOf.EMBEDDING, self.architecture.hidden_size, width, ""),) if width else ()

    def _path(self, layer: Layer, matrix: Matrix) -> str:
        return ".".join(filter(None, (self._root, "layers", str(layer.number), matrix.block, matrix.name)))


_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate"})
"""Matrices that are replicated on Megatron's tensor-parallel ranks."""
_ATTENTION = "self_attn"
