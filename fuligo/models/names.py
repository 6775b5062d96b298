"""Which tensor of a Hugging Face checkpoint is which tensor of a Megatron-Core model, and how the two differ. Pure Python.

Megatron's names are those of a model of local layers (`megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec`), with
layers and experts counted over all ranks. The checkpoint's names are those of the published files.
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
    """How Megatron lays out what the checkpoint has."""

    WHOLE = "whole"
    """The same tensor."""
    QKV = "qkv"
    """Queries, keys and values are one tensor: for each group of query heads its queries, its key, its value."""
    GATE_UP = "gate_up"
    """Gate and up projection are one tensor; each tensor-parallel rank has its share of the gate above its share of the other."""
    SWAPPED_HALVES = "swapped_halves"
    """The checkpoint has the second half of the columns first."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model."""

    megatron: str
    """Its name in Megatron's model; in a table without the name of its layer, and with `{expert}` for the number of an expert."""
    checkpoint: tuple[str, ...]
    """The names of its parts in the checkpoint, likewise: query, key, value; gate, up (or one tensor of both); else one."""
    shape: tuple[int, ...]
    """Of Megatron's tensor over all ranks, without padding of the vocabulary."""
    axis: int | None = None
    """Which of its axes tensor-parallel ranks share; None: every rank has all."""
    form: Form = Form.WHOLE
    all_experts: str | None = None
    """Of an expert's weight: the name under which transformers 5 keeps all experts as one tensor, [experts, ...]."""
    expert: int | None = None
    is_vocabulary: bool = False
    """Its rows are tokens; Megatron's tensor may have more of them, so that ranks can share it."""
    is_float32: bool = False
    """Kept and sent in float32 whatever the type of the weights."""

    def at(self, megatron_prefix: str, checkpoint_prefix: str) -> Weight:
        """The same weight of a certain layer."""
        return replace(
            self,
            megatron=megatron_prefix + self.megatron,
            checkpoint=tuple(checkpoint_prefix + name for name in self.checkpoint),
            all_experts=None if self.all_experts is None else checkpoint_prefix + self.all_experts,
        )

    def of_expert(self, expert: int) -> Weight:
        """The same weight of a certain expert."""
        names = tuple(name.format(expert=expert) for name in self.checkpoint)
        return replace(self, megatron=self.megatron.format(expert=expert), checkpoint=names, expert=expert)


Weights = tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class NameTable:
    """The weights of a family, by where they are; the names of those in layers follow the layer's."""

    model: Weights
    """Outside of all layers."""
    dense: Weights
    """In a layer with a dense MLP."""
    moe: Weights = ()
    """In a layer with routed experts."""
    indexer: Weights = ()
    """In a layer that computes its token choice (sparse attention), beside the others."""
    mtp: Weights = ()
    """In a multi-token-prediction layer, beside those of the layer that it contains."""
    mtp_prefix: str = "model.layers.{layer}."
    """Where the checkpoint has prediction layers: `{layer}` goes on from the layers before, `{mtp}` starts at 0."""
    mtp_copies: tuple[str, ...] = ()
    """In the checkpoint's prediction layers: copies of the embedding and the head, which Megatron's do not have."""


@dataclass(frozen=True)
class ModelNames:
    """All weights of one model."""

    architecture: Architecture
    table: NameTable

    def weights(self, num_mtp_layers: int | None = None) -> Iterator[Weight]:
        """Every weight with its full names, in the order of the layers.

        Args:
            num_mtp_layers: only the first of the prediction layers; None: all that the checkpoint has.
        """
        yield from self.table.model
        for layer in self.architecture.layers:
            yield from self._layer(layer, f"decoder.layers.{layer.number}.", f"model.layers.{layer.number}.")
        for number, layer in enumerate(self.architecture.mtp_layers[:num_mtp_layers]):
            prefix, theirs = f"mtp.layers.{number}.", self._mtp_prefix(number)
            yield from (weight.at(prefix, theirs) for weight in self.table.mtp)
            yield from self._layer(layer, f"{prefix}transformer_layer.", theirs)

    @cached_property
    def by_megatron_name(self) -> Mapping[str, Weight]:
        """Where the embedding is the head too, its weight stands under both names."""
        found = {weight.megatron: weight for weight in self.weights()}
        return found if HEAD in found else found | {HEAD: found[EMBEDDING]}

    def checkpoint_shapes(self, weight: Weight) -> tuple[tuple[int, ...], ...]:
        """Of the tensors that `weight.checkpoint` names."""
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
        """Whether a checkpoint may hold a tensor of this name, which a model with so many prediction layers does not need."""
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
    """Of the value model beside a policy: an output layer of one row in the place of the policy's head."""
    head = Weight(HEAD, ("lm_head.weight",), (1, policy.architecture.hidden_size))
    table = replace(policy.table, model=(*(weight for weight in policy.table.model if weight.megatron != HEAD), head))
    return ModelNames(replace(policy.architecture, tied_embeddings=False), table)


_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def with_expert(megatron_name: str, expert: int) -> str:
    """The name of the same weight of another expert."""
    return _EXPERT.sub(str(expert), megatron_name)
