"""Whole tensors of a policy with an adapter: the weights below it, the adapter, and the weights with the adapter merged into them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fuligo.formats.weight_manifest import MergeRounding
from fuligo.models.adapter import read_adapter_weights, require_shapes
from fuligo.models.adapter_names import ADAPTER_MODULE, AdapterNames
from fuligo.models.names import ModelNames
from fuligo.trainer.megatron_backend.lora import LinearAdapter, set_adapter
from fuligo.trainer.megatron_backend.weights.export import named_weights
from fuligo.trainer.megatron_backend.weights.local import linear_layers, local_weights
from fuligo.trainer.ranks.world import World


def load_adapter(chunks: Sequence[nn.Module], names: AdapterNames, directory: Path) -> None:
    """Overwrite this rank's parts of the adapter with those of a PEFT directory.

    Raises:
        CheckpointError: it is damaged, or does not fit the model.
    """
    tensors = read_adapter_weights(directory)
    require_shapes(tensors, {weight.checkpoint[0]: list(weight.shape) for weight in names.weights()}, directory)
    set_adapter(chunks, names, lambda weight: tensors[weight.checkpoint[0]])


@dataclass(slots=True, frozen=True)
class AdaptedStages:
    """Policy with its adapter as `AdapterSender` takes it."""

    chunks: Sequence[nn.Module]
    names: ModelNames
    adapter_names: AdapterNames
    dtype: torch.dtype
    world: World

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.chunks, self.names, dtype=self.dtype)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.chunks, self.adapter_names, dtype=self.dtype)

    def merged(self) -> "MergedStages":
        return MergedStages(self.chunks, self.names, self.dtype, self.world)


@dataclass(slots=True)
class MergedStages:
    """Weights with the adapter merged into them on the ranks that hold their parts, and the measure of what rounding left of its update."""

    chunks: Sequence[nn.Module]
    names: ModelNames
    dtype: torch.dtype
    world: World
    rounding: MergeRounding = field(default_factory=MergeRounding)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors as `named_weights` does, W + scaling B A for adapted layers. A collective.

        Sums are computed in float32 and rounded once. `rounding` is complete after the last tensor.
        """
        parts = _MergedParts(self.chunks, self.dtype)
        yield from named_weights(self.chunks, self.names, dtype=self.dtype, local=parts)
        counts = torch.tensor([parts.rounding.num_changed, parts.rounding.num_elements], dtype=torch.float64, device=self.world.device)
        self.rounding = MergeRounding(*(int(count) for count in self.world.sum(counts)))


class _MergedParts(Mapping[str, Tensor]):
    """This rank's parts of the weights; those of adapted layers are merged when they are read, so that few exist at a time."""

    def __init__(self, chunks: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._weights, self._dtype = local_weights(chunks), dtype
        self._adapters: dict[str, LinearAdapter] = {}
        for name, linear in linear_layers(chunks):
            if isinstance(adapter := getattr(linear, ADAPTER_MODULE, None), LinearAdapter):
                self._adapters[name] = adapter
        self.rounding = MergeRounding()
        """Counts of the weights that no other rank counts."""

    def __getitem__(self, name: str) -> Tensor:
        weight, adapter = self._weights[name], self._adapters.get(name)
        if adapter is None:
            return weight
        merged = (weight.float() + adapter.update()).to(self._dtype)
        if self._dtype != torch.float32 and adapter.is_first_copy and not adapter.is_zero:
            self.rounding += MergeRounding(int((merged != weight.to(self._dtype)).sum()), merged.numel())
        return merged

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # without merging it

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
