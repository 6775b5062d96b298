"""Full tensors of a policy with an adapter: base weights, adapter, and merged weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fuligo.formats.weight_manifest import MergeRounding
from fuligo.models.adapter import read_adapter_weights, require_shapes
from fuligo.models.adapter_names import AdapterNames, ExpertsFactor
from fuligo.models.names import ModelNames, Weight
from fuligo.trainer.megatron_backend.lora import Update, local_updates, set_adapter
from fuligo.trainer.megatron_backend.weights.export import named_weights
from fuligo.trainer.megatron_backend.weights.forms import experts_from_peft
from fuligo.trainer.megatron_backend.weights.local import local_weights
from fuligo.trainer.ranks.world import World


def load_adapter(chunks: Sequence[nn.Module], names: AdapterNames, directory: Path) -> None:
    """Load this rank's parts of the adapter from a PEFT directory.

    Raises CheckpointError if the directory is damaged or does not fit the model.
    """
    tensors = read_adapter_weights(directory)
    shapes = {weight.checkpoint[0]: list(shape) for weight in names.weights() for shape in names.checkpoint_shapes(weight)}
    require_shapes(tensors, shapes, directory)

    def whole(weight: Weight) -> Tensor:
        tensor = tensors[weight.checkpoint[0]]
        return experts_from_peft(weight, tensor) if isinstance(weight, ExpertsFactor) else tensor

    set_adapter(chunks, names, whole)


@dataclass(slots=True)
class AdaptedStages:
    """Policy with a LoRA adapter. Implements `AdaptedPolicy`."""

    chunks: Sequence[nn.Module]
    names: ModelNames
    adapter_names: AdapterNames
    dtype: torch.dtype
    world: World
    rounding: MergeRounding = field(default_factory=MergeRounding)
    """Number of adapted elements in the last `merged`, and how many of them differ from the base weights after rounding."""

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.chunks, self.names, dtype=self.dtype)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.chunks, self.adapter_names, dtype=self.dtype)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors like `named_weights`, with W + scaling B A for adapted layers. A collective.

        Each rank merges its parts before they are gathered. The sums are computed in float32 and rounded once. `rounding` is complete after
        the last tensor.
        """
        parts = _MergedParts(self.chunks, self.dtype)
        yield from named_weights(self.chunks, self.names, dtype=self.dtype, local=parts)
        counts = torch.tensor([parts.rounding.num_changed, parts.rounding.num_elements], dtype=torch.float64, device=self.world.device)
        self.rounding = MergeRounding(*(int(count) for count in self.world.sum(counts)))


class _MergedParts(Mapping[str, Tensor]):
    """This rank's parts of the weights. Adapted ones are merged on access, so that few merged tensors exist at a time."""

    def __init__(self, chunks: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._weights, self._dtype = local_weights(chunks), dtype
        self._updates: dict[str, Update] = dict(local_updates(chunks))
        self.rounding = MergeRounding()
        """Counts of this rank's parts, each counted on only one of the ranks that hold a copy."""

    def __getitem__(self, name: str) -> Tensor:
        weight, update = self._weights[name], self._updates.get(name)
        if update is None:
            return weight
        merged = (weight.float() + update.update()).to(self._dtype)
        if self._dtype != torch.float32 and update.is_first_copy and not update.is_zero:
            self.rounding += MergeRounding(int((merged != weight.to(self._dtype)).sum()), update.num_elements)
        return merged

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # the default would merge the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
