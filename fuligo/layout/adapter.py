"""Sizes of a LoRA adapter on the torch trainer, matrix by matrix. Imports neither numpy nor torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention, Layer, LinearAttention

FUSED_GATE_UP = frozenset({"glm4"})
"""Model types whose dense MLP has one layer for gate and up projection, in transformers 5.12.1."""


class InputOf(StrEnum):
    """Tensor that adapted matrices read. It is kept for the gradient of A; matrices with the same input share it."""

    ATTENTION = "attention"
    """Output of the norm before attention."""
    LATENT_QUERY = "latent_query"
    LATENT_KEY_VALUE = "latent_key_value"
    OUTPUT = "output"
    """Output of attention, which attention itself keeps."""
    MLP = "mlp"
    """Output of the norm before the MLP."""
    DOWN = "down"
    """Product of the activated gate and the up projection."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Linear layer of a transformer layer that an adapter can have."""

    name: str
    """As in `--lora-target-modules`."""
    source: InputOf
    inputs: int
    outputs: int


def matrices(layer: Layer, architecture: Architecture) -> Iterator[Matrix]:
    """Yield the linear layers of `layer` that an adapter can have, as `models.adapter.linear_layers` finds them in the model itself."""
    hidden, heads = architecture.hidden_size, architecture.attention
    if layer.is_linear:
        assert architecture.linear_attention is not None
        yield from _linear(architecture.linear_attention, hidden)
    elif isinstance(heads, GroupedAttention):
        query, key_value = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        yield Matrix("q_proj", InputOf.ATTENTION, hidden, 2 * query if heads.has_output_gate else query)
        yield Matrix("k_proj", InputOf.ATTENTION, hidden, key_value)
        yield Matrix("v_proj", InputOf.ATTENTION, hidden, key_value)
        yield Matrix("o_proj", InputOf.OUTPUT, query, hidden)
    else:
        yield from _latent(heads, hidden)
    if layer.is_moe and architecture.experts is not None and architecture.experts.has_shared_gate:
        yield Matrix("shared_expert_gate", InputOf.MLP, hidden, 1)
    if architecture.experts is not None:  # see `models.adapter`
        return
    width = architecture.intermediate_size
    if architecture.model_type in FUSED_GATE_UP:
        yield Matrix("gate_up_proj", InputOf.MLP, hidden, 2 * width)
    else:
        yield Matrix("gate_proj", InputOf.MLP, hidden, width)
        yield Matrix("up_proj", InputOf.MLP, hidden, width)
    yield Matrix("down_proj", InputOf.DOWN, width, hidden)


def _linear(heads: LinearAttention, hidden: int) -> Iterator[Matrix]:
    value = heads.num_value_heads * heads.value_dim
    if heads.has_fused_inputs:
        outputs = {"in_proj_qkvz": heads.num_channels + value, "in_proj_ba": 2 * heads.num_value_heads}
    else:
        steps = dict.fromkeys(("in_proj_b", "in_proj_a"), heads.num_value_heads)
        outputs = {"in_proj_qkv": heads.num_channels, "in_proj_z": value, **steps}
    for name, size in outputs.items():
        yield Matrix(name, InputOf.ATTENTION, hidden, size)
    yield Matrix("out_proj", InputOf.OUTPUT, value, hidden)


def _latent(heads: LatentAttention, hidden: int) -> Iterator[Matrix]:
    query = heads.num_heads * (heads.qk_nope_head_dim + heads.qk_rope_head_dim)
    if heads.q_lora_rank is None:
        yield Matrix("q_proj", InputOf.ATTENTION, hidden, query)
    else:
        yield Matrix("q_a_proj", InputOf.ATTENTION, hidden, heads.q_lora_rank)
        yield Matrix("q_b_proj", InputOf.LATENT_QUERY, heads.q_lora_rank, query)
    yield Matrix("kv_a_proj_with_mqa", InputOf.ATTENTION, hidden, heads.kv_lora_rank + heads.qk_rope_head_dim)
    key_value = heads.num_heads * (heads.qk_nope_head_dim + heads.v_head_dim)
    yield Matrix("kv_b_proj", InputOf.LATENT_KEY_VALUE, heads.kv_lora_rank, key_value)
    yield Matrix("o_proj", InputOf.OUTPUT, heads.num_heads * heads.v_head_dim, hidden)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Adapter of a run on a model."""

    config: AdapterConfig
    architecture: Architecture

    def adapted(self, layer: Layer) -> tuple[Matrix, ...]:
        """Return the adapted matrices of one layer."""
        return tuple(matrix for matrix in matrices(layer, self.architecture) if self._is_target(matrix, layer))

    @property
    def names(self) -> tuple[str, ...]:
        """Last parts of the names of all adapted matrices."""
        return tuple(sorted({matrix.name for layer in self.architecture.layers for matrix in self.adapted(layer)}))

    def layer_parameters(self, layer: Layer) -> int:
        """Return the parameters of A [rank, inputs] and B [outputs, rank] of all adapted matrices of one layer."""
        return sum(self.config.rank * (matrix.inputs + matrix.outputs) for matrix in self.adapted(layer))

    @property
    def num_parameters(self) -> int:
        return sum(self.layer_parameters(layer) for layer in self.architecture.layers)

    def _is_target(self, matrix: Matrix, layer: Layer) -> bool:
        """Return whether a target is the matrix's name, or a longer name that ends so, as PEFT matches them."""
        attention = "linear_attn" if layer.is_linear else "self_attn"
        block = attention if matrix.source in _OF_ATTENTION else "mlp"
        path = f"model.layers.{layer.number}.{block}.{matrix.name}"
        targets = self.config.target_modules
        return not targets or any(path == target or path.endswith(f".{target}") for target in targets)


_OF_ATTENTION = frozenset({InputOf.ATTENTION, InputOf.LATENT_QUERY, InputOf.LATENT_KEY_VALUE, InputOf.OUTPUT})
