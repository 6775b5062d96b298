"""Merge of a LoRA adapter into the weights of its base model, written as a Hugging Face directory."""

from pathlib import Path

import torch
from torch import Tensor

from fuligo.convert.dist_to_hf import write_directory
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig, adapted_weight
from fuligo.formats.hf_tensors import InOwnDtypes
from fuligo.formats.quantized_base import QuantizedBase
from fuligo.formats.weight_manifest import MergeRounding
from fuligo.models.adapter import LowRankUpdate, empty_model, read_adapter_weights, require_fits
from fuligo.models.experts_adapter import stacked_factors
from fuligo.models.quantized_linear import quantizable_weights, rounded


class MergedTensors(InOwnDtypes):
    """Tensors of a base model with an adapter merged: W + scaling * B A, summed in float32 and rounded once to the base's dtype.

    If the adapter was trained on a quantized base, W is the quantized and dequantized weight, also in linear layers without an adapter.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        """Read the headers of the base, and the adapter. Raises CheckpointError if they are damaged or do not belong together."""
        super().__init__(base)
        self.rounding = MergeRounding()
        """Elements that the merge changed after rounding; complete when all tensors have been read. Float32 tensors are not counted."""
        config, tensors = AdapterConfig.read(adapter), read_adapter_weights(adapter)
        require_fits(tensors, config, adapter, base)
        self.quantized = QuantizedBase.read(adapter)
        """Storage format of the base that the adapter was trained on; None if it was not quantized."""
        self._quantized: frozenset[str] = frozenset()
        if self.quantized is not None:
            self._quantized = frozenset(self._quantizable(base, adapter))
        self._updates: dict[str, LowRankUpdate] = {}
        for stored in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
            update = LowRankUpdate(tensors[stored], tensors[stored.replace(".lora_A.", ".lora_B.")], config.scaling)
            self._updates |= self._by_file_name(adapted_weight(stored), update, num_experts=len(update.a) // config.rank)
        for name, update in self._updates.items():
            shape = self.shapes.get(name)
            wanted = (len(update.b), update.a.shape[1])
            if shape is None or shape[-2:] != wanted:
                raise CheckpointError(
                    f"cannot merge {adapter} into {base}: {name} is {list(shape or ()) or 'absent'} in the base, but {list(wanted)} in the "
                    f"adapter; use the model that the adapter was trained on ({config.base or 'its adapter_config.json names none'})"
                )

    def _quantizable(self, base: Path, adapter: Path) -> list[str]:
        """Return the names of the weights that were quantized in training. Raises CheckpointError if the base lacks one of them."""
        model = empty_model(base)
        try:
            names = [stored for name in quantizable_weights(model) for stored in self._file_names(name, len(model.get_parameter(name)))]
        except ConfigError as error:
            raise CheckpointError(f"cannot merge {adapter} into {base}: {'; '.join(error.problems)}") from error
        if absent := [name for name in names if name not in self.shapes]:
            raise CheckpointError(
                f"cannot merge {adapter} into {base}: the adapter was trained on a quantized base, and {base} lacks {absent[0]}; use the "
                "model that the adapter was trained on"
            )
        return names

    def _file_names(self, name: str, num_experts: int) -> list[str]:
        """Return the names of a weight in the base's files, which may hold experts one by one."""
        module, _, matrix = name.rpartition(".")
        if matrix == "weight" or name in self.shapes:
            return [name]
        kinds = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        return [f"{module}.{expert}.{kind}.weight" for expert in range(num_experts) for kind in kinds]

    def _by_file_name(self, name: str, update: LowRankUpdate, *, num_experts: int) -> dict[str, LowRankUpdate]:
        """Return the updates of a weight by its names in the base's files (see `_file_names`)."""
        names = self._file_names(name, num_experts)
        if names == [name]:
            return {name: update}
        factors = zip(*stacked_factors(update.a, update.b, num_experts), strict=True)
        parts = [LowRankUpdate(a, part, update.scaling) for a, b in factors for part in b.chunk(len(names) // num_experts)]
        return dict(zip(names, parts, strict=True))

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError if its file cannot be read."""
        weight, update = super().read(name), self._updates.get(name)
        if self.quantized is not None and name in self._quantized:
            weight = rounded(weight, self.quantized)
        if update is None:
            return weight
        merged = update.added_to(weight).to(weight.dtype)
        if weight.dtype != torch.float32:
            self.rounding += MergeRounding(int((merged != weight).sum()), merged.numel())
        return merged


def merge_adapter(base: Path, adapter: Path, target: Path) -> MergeRounding:
    """Merge the PEFT directory `adapter` into `base`, write the model to `target`, and return how many elements changed.

    Raises CheckpointError if a directory is damaged, the adapter does not fit the base, or the target cannot be written.
    """
    weights = MergedTensors(base, adapter)
    write_directory(weights, base, target)
    return weights.rounding
