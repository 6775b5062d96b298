"""LoRA adapter of the torch trainer's policy: its layers, its full tensors, and merged weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import CheckpointError
from fuligo.formats.host_copies import cast_together
from fuligo.formats.quantized_base import QuantizedBase, other_storage
from fuligo.formats.weight_manifest import MergeRounding
from fuligo.models.adapter import LowRankUpdate, adapter_tensors, add_adapter, load_adapter, updates_of
from fuligo.models.quantized_linear import quantize_base
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.torch_backend.weights import full_tensor, held_tensors, keeps_dtype, named_weights


def add_policy_adapter(
    model: PreTrainedModel, lora: LoraSettings, *, seed: int, base: QuantizedBase | None = None, device: torch.device
) -> None:
    """Add the run's adapter to its policy and freeze all other parameters.

    `base`: storage of the frozen linear layers on `device`; None: do not quantize them. Raises ConfigError if the model lacks a layer that
    is to be adapted, and CheckpointError if the initial adapter is damaged, or belongs to another model or base precision.
    """
    add_adapter(model, lora.adapter, seed=seed)
    if lora.initial_adapter is not None:
        _require_same_base(lora.initial_adapter, base)
        load_adapter(model, lora.initial_adapter)
    if base is not None:
        quantize_base(model, base, device)


def _require_same_base(adapter: Path, base: QuantizedBase | None) -> None:
    """Raise CheckpointError if an adapter was trained on a base in another precision; one without a record of its base is accepted."""
    trained_on = QuantizedBase.read(adapter)
    if trained_on is not None and trained_on != base:
        raise CheckpointError(
            f"cannot start from {adapter}: it {other_storage(trained_on, base)}; use --lora-base-precision {trained_on.precision}, or "
            "merge the adapter into its base: fuligo convert merge-adapter"
        )


def store_base_in_half_precision(model: nn.Module) -> None:
    """Convert frozen parameters to bfloat16, the data type of the model's passes, because no updates are added to them.

    Parameters that engines hold in float32 are not converted.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not keeps_dtype(name, parameter):
            parameter.data = parameter.data.to(torch.bfloat16)


def named_adapter_weights(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the adapter's full tensors, cast to `dtype`, with their names in PEFT's files. A collective if sharded."""
    full = ((name, full_tensor(parameter)) for name, parameter in adapter_tensors(model).items())
    return full if dtype is None else cast_together(full, dtype)


@dataclass(slots=True)
class AdaptedModel:
    """Policy with a LoRA adapter. Implements `AdaptedPolicy`."""

    model: PreTrainedModel
    dtype: torch.dtype
    rounding: MergeRounding = field(default_factory=MergeRounding)
    """Number of adapted elements in the last `merged`, and how many of them differ from the base weights after rounding."""

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model, dtype=self.dtype)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        return named_adapter_weights(self.model, dtype=self.dtype)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors like `named_weights`, with W + scaling B A for adapted layers. A collective if sharded.

        The sums are computed in float32 and rounded once. `rounding` is complete after the last tensor.
        """
        updates = updates_of(self.model)
        self.rounding = MergeRounding()
        for name, tensor in held_tensors(self.model).items():
            full = full_tensor(tensor)
            if live := updates.get(name):
                update = LowRankUpdate(full_tensor(live.a), full_tensor(live.b), live.scaling)
                merged = update.added_to(full).to(self.dtype)
                if self.dtype != torch.float32 and update.b.any():
                    self.rounding += MergeRounding(int((merged != full.to(self.dtype)).sum()), merged.numel())
                yield name, merged
            else:
                is_cast = full.is_floating_point() and not keeps_dtype(name, tensor)
                yield name, full.to(self.dtype) if is_cast else full
