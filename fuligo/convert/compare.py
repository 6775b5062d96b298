"""Bitwise comparison of two checkpoints, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fuligo.checkpoint.location import saved_value_model, training_checkpoint, weights_directory, weights_of
from fuligo.convert.dist_to_hf import Weights
from fuligo.convert.hf_view import HuggingFaceView
from fuligo.formats.buckets import as_bytes
from fuligo.formats.checkpoint_files import VALUE_MODEL, is_distributed
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.hf_tensors import HuggingFaceTensors

CHUNK_ELEMENTS = 2**24
"""Number of elements compared at a time in float64."""


@dataclass(slots=True, frozen=True)
class Comparison:
    """Result of the comparison of one tensor."""

    name: str
    difference: str
    """Description of the difference; empty if the tensors are bitwise equal."""
    largest: float = 0.0
    """Largest absolute difference of an element; infinite if the tensors cannot be compared."""


def compare(first: Path, second: Path, model: Path | None = None) -> Iterator[Comparison]:
    """Yield one result for each tensor that either checkpoint has.

    Two distributed checkpoints are compared completely, including the optimizer's state; otherwise only the weights are compared, under
    their Hugging Face names. Value models of two training checkpoints are compared too; a value model that only one of them has is a
    difference.

    Args:
        first: a checkpoint, a directory of checkpoints (the newest is used), or a Hugging Face directory; so is `second`.
        model: directory with config.json, if a distributed checkpoint lacks it.
    """
    checkpoints = training_checkpoint(first), training_checkpoint(second)
    one, other = (
        weights_directory(given) if checkpoint is None else weights_of(checkpoint)
        for given, checkpoint in zip((first, second), checkpoints, strict=True)
    )
    yield from _all_compared(one, other, model, named=(first, second))
    if None in checkpoints:
        return
    values, other_values = map(saved_value_model, checkpoints)
    if values is not None and other_values is not None:
        for found in _all_compared(values, other_values, model, named=(first, second)):
            yield replace(found, name=f"{VALUE_MODEL}/{found.name}")
    elif values is not None or other_values is not None:
        yield Comparison(VALUE_MODEL, f"a value model is only in {second if values is None else first}", float("inf"))


def _all_compared(here: Path, there: Path, model: Path | None, *, named: tuple[Path, Path]) -> Iterator[Comparison]:
    """Yield one result for each tensor of two directories of weights. `named`: paths to show in the results."""
    as_they_are = is_distributed(here) and is_distributed(there)
    one, other = (_open(place, model, as_they_are=as_they_are) for place in (here, there))
    first, second = named
    for name in [*one.shapes, *(name for name in other.shapes if name not in one.shapes)]:
        if name not in one.shapes or name not in other.shapes:
            yield Comparison(name, f"only in {first if name in one.shapes else second}", float("inf"))
        elif one.shapes[name] != other.shapes[name]:
            yield Comparison(name, f"shape {list(one.shapes[name])} and {list(other.shapes[name])}", float("inf"))
        else:
            yield _compared(name, one.read(name), other.read(name))


def _compared(name: str, one: Tensor, other: Tensor) -> Comparison:
    same_type = one.dtype == other.dtype
    if same_type and torch.equal(as_bytes(one), as_bytes(other)):
        return Comparison(name, "")
    types = "" if same_type else f"{_short(one.dtype)} and {_short(other.dtype)}, "
    largest, count = 0.0, 0
    for mine, theirs in zip(one.reshape(-1).split(CHUNK_ELEMENTS), other.reshape(-1).split(CHUNK_ELEMENTS), strict=True):
        differences = (mine.double() - theirs.double()).abs()
        unequal = ~((mine.double() == theirs.double()) | (mine.isnan() & theirs.isnan()))
        count += int(unequal.sum())
        largest = max(largest, float(differences.nan_to_num(nan=float("inf"))[unequal].max()) if unequal.any() else 0.0)
    numbers = f"{count} of {one.numel()} values differ{'s' if count == 1 else ''}, by up to {largest:.3g}" if count else "equal values"
    return Comparison(name, types + numbers, largest)


def _open(directory: Path, model: Path | None, *, as_they_are: bool) -> Weights:
    if is_distributed(directory):
        return DistributedTensors(directory) if as_they_are else HuggingFaceView(directory, model)
    return HuggingFaceTensors(directory)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
