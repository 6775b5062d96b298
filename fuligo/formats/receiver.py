"""The engine's end of a weight sync: new weights for a loaded model. Everything is checked before anything is copied."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fuligo.errors import WeightSyncError
from fuligo.formats.checkpoint_form import checkpoint_weights, prediction_prefixes
from fuligo.formats.payload import NamedTensors


class WeightStore:
    """The model's parameters and saved buffers by the names of checkpoints, in which each expert has matrices of its own.

    A weight sync may come in several buckets; the last one brings the new version. Tensors of prediction layers, which transformers' models
    lack, are passed over.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.version = 0
        self._unused = prediction_prefixes(module.config.to_dict())
        self._missing: set[str] = set()
        """What an unfinished weight sync has yet to send; empty when none is under way."""

    @property
    def torn(self) -> bool:
        """Some weights are of a newer version than others: nothing may be sampled."""
        return bool(self._missing)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The model's own memory, each weight once: tied ones under the first of their names."""
        weights = self._under_all_names()
        first_names = _first_names(weights)
        return {name: tensor for name, tensor in weights.items() if first_names[name] == name}

    def load_tensors(self, tensors: NamedTensors, version: int | None, *, source: str = "this bucket") -> None:
        """One bucket. `version` is given with the last one, after which every weight must have been sent.

        Raises:
            WeightSyncError: an unknown name, another shape, not a float type, or weights missing at the end; the weights are as before
        """
        tensors = [(name, tensor) for name, tensor in tensors if not name.startswith(self._unused)]
        weights = self._under_all_names()
        first_names = _first_names(weights)
        problems = [problem for name, tensor in tensors if (problem := _misfit(name, tensor, weights.get(name)))]
        missing = (self._missing or set(first_names.values())) - {first_names[name] for name, _ in tensors if name in first_names}
        if version is not None:
            problems += [f"{name} was not sent" for name in weights if name in missing]
        if problems:
            raise WeightSyncError(f"weights refused, nothing of {source} was loaded: {'; '.join(problems[:8])} ({len(problems)} problems)")
        with torch.no_grad():
            for name, tensor in tensors:
                weights[name].copy_(tensor)
        self._missing = missing
        if version is not None:
            self.version = version

    def load_directory(self, path: str, version: int) -> None:
        """A Hugging Face directory, as a whole.

        Raises:
            WeightSyncError: it cannot be read, or its tensors are not exactly the model's; the weights are as before
        """
        dtype = next(self.module.parameters()).dtype
        try:
            loaded, report = cast(Any, AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True))
        except Exception as error:  # whatever a damaged directory makes the loaders raise, it is the caller's to hear of
            raise WeightSyncError(f"weights refused: {path}: {type(error).__name__}: {error}") from error
        unexpected = [name for name in report["unexpected_keys"] if not name.startswith(self._unused)]
        found = {**report, "unexpected_keys": unexpected}
        problems = [
            f"{kind}: {sorted(map(str, found[kind]))[:8]}" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if found[kind]
        ]
        if problems:
            raise WeightSyncError(f"weights refused: {path} is not a checkpoint of this model: {'; '.join(problems)}")
        self.load_tensors(list(checkpoint_weights(loaded.state_dict().items())), version, source=path)

    def _under_all_names(self) -> dict[str, torch.Tensor]:
        return dict(checkpoint_weights(self.module.state_dict(keep_vars=True).items()))


def _first_names(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first of those that its tensor has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in weights.items()}


def _misfit(name: str, tensor: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    if weight is None:
        return f"the model has no weight {name}"
    if tensor.shape != weight.shape:
        return f"{name} has shape {list(tensor.shape)}, the model's has {list(weight.shape)}"
    if not tensor.is_floating_point():
        return f"{name} is {tensor.dtype}, not a float type"
    return None
