"""Weights in the files of a Hugging Face checkpoint, read in slices."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.hugging_face import read_stored_tensors
from fuligo.models.names import Form, ModelNames, Weight
from fuligo.quantities import count

NUM_LISTED = 5
"""Largest number of tensors that an error lists."""


class StoredWeights:
    """Checkpoint with exactly the weights of a model, and possibly more MTP layers. Files are opened on first use. Thread-safe.

    Raises CheckpointError if weights are quantized, there are fewer than `num_mtp_layers` MTP layers, files are damaged, or tensors are
    missing, unknown, or have shapes that contradict config.json.
    """

    def __init__(self, directory: Path, names: ModelNames, num_mtp_layers: int) -> None:
        self._directory = directory
        self._names = names
        if names.architecture.is_quantized:
            raise CheckpointError(f"cannot train {directory}: its weights are quantized; use the checkpoint in bf16")
        if num_mtp_layers > (num_stored := len(names.architecture.mtp_layers)):
            raise CheckpointError(f"--mtp-num-layers {num_mtp_layers}: {directory} has {count(num_stored, 'MTP layer')}; lower the flag")
        self._tensors = read_stored_tensors(directory)
        self._files: dict[str, Any] = {}
        self._open_files = ExitStack()
        self._opening = Lock()
        tensors = self._tensors
        expected = {name: shape for weight in self._names.weights(num_mtp_layers) for name, shape in self._stored_as(weight)}
        self._refuse("lacks", (name for name in expected if name not in tensors))
        self._refuse(
            "contains tensors that config.json does not account for:",
            (name for name in tensors if name not in expected and not self._names.is_superfluous(name, num_mtp_layers)),
        )
        self._refuse(
            "has different shapes than config.json says:",
            (
                f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
                for name, shape in expected.items()
                if tensors[name].shape != shape
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def parts(self, weight: Weight) -> list[StoredPart]:
        """Return the stored parts of a weight: queries, keys and values; gate and up projection; or a single tensor."""
        stored = [name for name, _ in self._stored_as(weight)]
        if weight.form is not Form.GATE_UP:
            return [StoredPart(self, name, weight.expert if name == weight.all_experts else None) for name in stored]
        rows = weight.shape[0] // 2
        if len(stored) == 2:
            return [StoredPart(self, name, None) for name in stored]
        expert = weight.expert if stored[0] == weight.all_experts else None
        return [StoredPart(self, stored[0], expert, first_row) for first_row in (0, rows)]

    def slices(self, name: str) -> Any:
        """Return a lazy view of the tensor `name`; indexing it reads only the requested part."""
        file = self._tensors[name].file
        with self._opening:
            if file not in self._files:
                self._files[file] = self._open_files.enter_context(safe_open(self._directory / file, framework="pt"))
        return self._files[file].get_slice(name)

    def _stored_as(self, weight: Weight) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the stored tensors that contain a weight."""
        if weight.all_experts in self._tensors and weight.checkpoint[0] not in self._tensors:
            experts = self._names.architecture.experts
            assert weight.all_experts is not None and experts is not None
            return [(weight.all_experts, (experts.num_experts, *weight.shape))]
        return zip(weight.checkpoint, self._names.checkpoint_shapes(weight), strict=True)

    def _refuse(self, problem: str, names: Iterable[str]) -> None:
        if found := list(names):
            more = f" and {len(found) - NUM_LISTED} more" if len(found) > NUM_LISTED else ""
            raise CheckpointError(
                f"cannot load {self._directory}: it {problem} {', '.join(found[:NUM_LISTED])}{more}; copy or convert it again"
            )


@dataclass(slots=True, frozen=True)
class StoredPart:
    """Tensor of the checkpoint, or a part of it: one expert of a tensor with all experts, or the rows from `first_row` on."""

    weights: StoredWeights
    name: str
    expert: int | None
    first_row: int = 0

    def read(self, axis: int, start: int, stop: int) -> Tensor:
        """Read the elements `start` to `stop` along `axis`, 0 or 1."""
        assert axis == 0 or self.first_row == 0
        rows = slice(self.first_row + start, self.first_row + stop)
        index = (rows,) if axis == 0 else (slice(None), slice(start, stop))
        content = self.weights.slices(self.name)
        return content[index] if self.expert is None else content[(slice(self.expert, self.expert + 1), *index)][0]


def has_value_head(directory: Path) -> bool:
    """Return whether the checkpoint's output layer has one row, as in a value model. Raises CheckpointError if a file is damaged."""
    head = read_stored_tensors(directory).get("lm_head.weight")
    return head is not None and head.shape[0] == 1
