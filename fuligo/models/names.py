"""Names and layouts of weights in Hugging Face checkpoints and in Megatron-Core models. Imports neither numpy nor torch.

Megatron's names are those of a model with the local layer spec (`megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec`), with
layers and experts numbered over all ranks. The checkpoint's names are those of the published files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from fuligo.models.architecture import Architecture, GroupedAttention, Layer

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class Form(StrEnum):
    """Layout of a Megatron tensor relative to the checkpoint's."""

    WHOLE = "whole"
    """The same tensor."""
    QKV = "qkv"
    """Queries, keys and values are one tensor: for each group of query heads, the queries, the key and the value."""
    GATE_UP = "gate_up"
    """Gate and up projection are one tensor; each tensor-parallel rank stacks its share of the gate on its share of the up projection."""
    SWAPPED_HALVES = "swapped_halves"
    """The checkpoint's tensor has the two halves of the columns swapped."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model."""

    megatron: str
    """Name in Megatron's model; in a `NameTable`, relative to its layer, with `{expert}` for the index of an expert."""
    checkpoint: tuple[str, ...]
    """Names in the checkpoint, relative like `megatron`: query, key, value; gate, up (or one tensor of both); else a single name."""
    shape: tuple[int, ...]
    """Shape of Megatron's tensor over all ranks, without padding of the vocabulary."""
    axis: int | None = None
    """Axis that tensor-parallel ranks split; None: replicated."""
    form: Form = Form.WHOLE
    all_experts: str | None = None
    """Name under which transformers 5 stores all experts as one tensor, [experts, ...]; None: not an expert's weight."""
    expert: int | None = None
    """Index of the expert; None: not an expert's weight, or an entry of a `NameTable` for all experts."""
    is_vocabulary: bool = False
    """True if rows are indexed by token id; Megatron's tensor may be padded with more rows, so that ranks can split it evenly."""
    is_float32: bool = False
    """True if it is stored and sent in float32, whatever the dtype of the weights."""

    def at(self, megatron_prefix: str, checkpoint_prefix: str) -> Weight:
        """Return a copy with a layer's prefixes before the names."""
        return replace(
            self,
            megatron=megatron_prefix + self.megatron,
            checkpoint=tuple(checkpoint_prefix + name for name in self.checkpoint),
            all_experts=None if self.all_experts is None else checkpoint_prefix + self.all_experts,
        )

    def of_expert(self, expert: int) -> Weight:
        names = tuple(name.format(expert=expert) for name in self.checkpoint)
        return replace(self, megatron=self.megatron.format(expert=expert), checkpoint=names, expert=expert)


Weights = tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class NameTable:
    """Weights of a family's models, by their place in the model; names in layers are relative to the layer."""

    model: Weights
    """Weights outside of all layers."""
    dense: Weights
    """Weights of a layer with a dense MLP."""
    moe: Weights = ()
    """Weights of a layer with routed experts."""
    indexer: Weights = ()
    """Additional weights of a layer with an indexer (sparse attention)."""
    mtp: Weights = ()
    """Weights that an MTP layer has in addition to the transformer layer that it contains."""
    mtp_prefix: str = "model.layers.{layer}."
    """Prefix of MTP layers in the checkpoint: `{layer}` continues the numbering of the other layers, `{mtp}` starts at 0."""
    mtp_copies: tuple[str, ...] = ()
    """Names of copies of the embedding and the head in the checkpoint's MTP layers; Megatron's MTP layers have none."""


@dataclass(frozen=True)
class ModelNames:
    """Names of all weights of one model."""

    architecture: Architecture
    table: NameTable

    def weights(self, num_mtp_layers: int | None = None) -> Iterator[Weight]:
        """Yield every weight with its full names, layer by layer, including the first `num_mtp_layers` MTP layers (None: all)."""
        yield from self.table.model
        for layer in self.architecture.layers:
            yield from self._layer(layer, f"decoder.layers.{layer.number}.", f"model.layers.{layer.number}.")
        for number, layer in enumerate(self.architecture.mtp_layers[:num_mtp_layers]):
            prefix, theirs = f"mtp.layers.{number}.", self._mtp_prefix(number)
            yield from (weight.at(prefix, theirs) for weight in self.table.mtp)
            yield from self._layer(layer, f"{prefix}transformer_layer.", theirs)

    @cached_property
    def by_megatron_name(self) -> Mapping[str, Weight]:
        """Weights by Megatron name; a tied embedding is listed as the head too."""
        found = {weight.megatron: weight for weight in self.weights()}
        return found if HEAD in found else found | {HEAD: found[EMBEDDING]}

    def checkpoint_shapes(self, weight: Weight) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors that `weight.checkpoint` names."""
        rows, *rest = weight.shape
        match weight.form:
            case Form.QKV:
                heads = self.architecture.attention
                assert isinstance(heads, GroupedAttention)
                sizes = [num * heads.head_dim for num in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
            case Form.GATE_UP:
                sizes = [rows // len(weight.checkpoint)] * len(weight.checkpoint)
            case _:
                sizes = [rows]
        return tuple((size, *rest) for size in sizes)

    def is_superfluous(self, checkpoint_name: str, num_mtp_layers: int) -> bool:
        """Return whether a checkpoint may hold a tensor of this name that a model with `num_mtp_layers` MTP layers does not need."""
        if checkpoint_name.endswith(".rotary_emb.inv_freq"):
            return True
        if self.architecture.tied_embeddings and checkpoint_name == "lm_head.weight":
            return True
        prefixes = [self._mtp_prefix(number) for number in range(len(self.architecture.mtp_layers))]
        copies = {prefix + name for prefix in prefixes for name in self.table.mtp_copies}
        return checkpoint_name in copies or checkpoint_name.startswith(tuple(prefixes[num_mtp_layers:]))

    def _layer(self, layer: Layer, megatron_prefix: str, checkpoint_prefix: str) -> Iterator[Weight]:
        rows = self.table.moe if layer.is_moe else self.table.dense
        for row in (*rows, *self.table.indexer) if layer.computes_index else rows:
            weight = row.at(megatron_prefix, checkpoint_prefix)
            if weight.all_experts is None:
                yield weight
            else:
                assert self.architecture.experts is not None
                yield from (weight.of_expert(expert) for expert in range(self.architecture.experts.num_experts))

    def _mtp_prefix(self, number: int) -> str:
        return self.table.mtp_prefix.format(layer=self.architecture.num_layers + number, mtp=number)


def value_names(policy: ModelNames) -> ModelNames:
    """Return the weight names of a policy's value model, whose output layer has one row in place of the vocabulary."""
    head = Weight(HEAD, ("lm_head.weight",), (1, policy.architecture.hidden_size))
    table = replace(policy.table, model=(*(weight for weight in policy.table.model if weight.megatron != HEAD), head))
    return ModelNames(replace(policy.architecture, tied_embeddings=False), table)


_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def with_expert(megatron_name: str, expert: int) -> str:
    """Return the Megatron name of an expert's weight with the index of another expert."""
    return _EXPERT.sub(str(expert), megatron_name)
