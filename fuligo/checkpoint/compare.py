"""Two checkpoints tensor by tensor: names, shapes, types, and every bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from fuligo.checkpoint.dist_tensors import DistributedTensors
from fuligo.checkpoint.hf_view import HuggingFaceView
from fuligo.checkpoint.location import is_distributed, weights_directory
from fuligo.config.hugging_face import DamagedFileError, read_stored_tensors
from fuligo.errors import CheckpointError

CHUNK_ELEMENTS = 2**24
"""Compared at a time in higher precision."""


class Tensors(Protocol):
    """Tensors by name, each read when it is asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class Comparison:
    """What became of one tensor."""

    name: str
    difference: str
    """Empty: equal to the bit."""
    largest: float = 0.0
    """Largest absolute difference of an element; infinite where there is none to speak of."""


def compare(first: Path, second: Path, model: Path | None = None) -> Iterator[Comparison]:
    """One entry a tensor that either has.

    Two distributed checkpoints are compared in everything that they hold, the optimizer's state included. Of one and a Hugging Face
    directory the weights are compared, under the directory's names.

    Args:
        model: directory with config.json, where a distributed checkpoint does not have it.

    Raises:
        CheckpointError: one is damaged, or no checkpoint.
        ConfigError: one is a distributed checkpoint of a model whose names are not known.
    """
    places = weights_directory(first), weights_directory(second)
    as_they_are = all(map(is_distributed, places))
    one, other = (_open(place, model, as_they_are=as_they_are) for place in places)
    for name in [*one.shapes, *(name for name in other.shapes if name not in one.shapes)]:
        if name not in one.shapes or name not in other.shapes:
            yield Comparison(name, f"only in {first if name in one.shapes else second}", float("inf"))
        elif one.shapes[name] != other.shapes[name]:
            yield Comparison(name, f"shape {list(one.shapes[name])} and {list(other.shapes[name])}", float("inf"))
        else:
            yield _compared(name, one.read(name), other.read(name))


def _compared(name: str, one: Tensor, other: Tensor) -> Comparison:
    same_type = one.dtype == other.dtype
    if same_type and torch.equal(_bytes(one), _bytes(other)):
        return Comparison(name, "")
    types = "" if same_type else f"{_short(one.dtype)} and {_short(other.dtype)}, "
    largest, count = 0.0, 0
    for mine, theirs in zip(one.reshape(-1).split(CHUNK_ELEMENTS), other.reshape(-1).split(CHUNK_ELEMENTS), strict=True):
        differences = (mine.double() - theirs.double()).abs()
        unequal = ~((mine.double() == theirs.double()) | (mine.isnan() & theirs.isnan()))
        count += int(unequal.sum())
        largest = max(largest, float(differences.nan_to_num(nan=float("inf"))[unequal].max()) if unequal.any() else 0.0)
    numbers = f"{count} of {one.numel()} numbers differ, by up to {largest:.3g}" if count else "equal numbers"
    return Comparison(name, types + numbers, largest)


def _open(directory: Path, model: Path | None, *, as_they_are: bool) -> Tensors:
    if is_distributed(directory):
        return DistributedTensors(directory) if as_they_are else HuggingFaceView(directory, model)
    return _Safetensors(directory)


class _Safetensors:
    """Of a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        try:
            self._stored = read_stored_tensors(directory)
        except DamagedFileError as error:
            raise CheckpointError(str(error)) from None
        self._directory = directory
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}

    def read(self, name: str) -> Tensor:
        with safe_open(self._directory / self._stored[name].file, framework="pt") as file:
            return file.get_tensor(name)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
