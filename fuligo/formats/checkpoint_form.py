"""The form in which weights travel: tensors with the names of published checkpoints. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fuligo.formats.quantisation import expert_parts

if TYPE_CHECKING:
    from torch import Tensor


def checkpoint_weights(named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Experts that are one tensor come out as the matrices that checkpoints have, as views of it; all else as it is."""
    for name, weight in named_weights:
        parts = expert_parts(name, tuple(weight.shape))
        if not parts:
            yield name, weight
        for part in parts:
            yield part.name, weight[part.expert, part.first_row : part.first_row + part.num_rows]


def prediction_prefixes(config_json: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of weights in layers for multi-token prediction start, in DeepSeek-V3's files and those of families after it.

    They go on counting from the model's layers. transformers 5.12.1 has no such layers.
    """
    first, number = config_json.get("num_hidden_layers"), config_json.get("num_nextn_predict_layers")
    return tuple(f"model.layers.{first + depth}." for depth in range(number or 0)) if first is not None else ()
