"""Full tensors of a policy with an adapter: base weights, adapter, and merged weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fuligo.formats.weight_manifest import MergeRounding
from fuligo.models.adapter import read_adapter_weights, require_shapes
from fuligo.models.adapter_names import AdapterNames, ExpertsFactor
from fuligo.models.names import ModelNames, Weight
from fuligo.trainer.megatron_backend.lora import local_updates, set_adapter
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
        weights, updates = local_weights(self.chunks), dict(local_updates(self.chunks))
        rounding = MergeRounding()

        def merged(name: str) -> Tensor:
            """Return this rank's part of a weight. Parts are merged when they are sent, so that few merged ones exist at a time."""
            nonlocal rounding
            weight, update = weights[name], updates.get(name)
            if update is None:
                return weight
            difference = update.difference()
            merged = (weight.float() + difference).to(self.dtype)
            if self.dtype != torch.float32 and update.is_first_copy and difference.any():
                rounding += MergeRounding(int((merged != weight.to(self.dtype)).sum()), update.num_elements)
            return merged

        yield from named_weights(self.chunks, self.names, dtype=self.dtype, part_of=merged)
        counts = torch.tensor([rounding.num_changed, rounding.num_elements], dtype=torch.float64, device=self.world.device)
        self.rounding = MergeRounding(*(int(count) for count in self.world.sum(counts)))
