"""Tensor names of published checkpoints, the form in which weights are synced. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fuligo.formats.quantisation import expert_parts
from fuligo.formats.stored_experts import StoredExperts, mixtral_name

if TYPE_CHECKING:
    from torch import Tensor


def checkpoint_weights(
    named_weights: Iterable[tuple[str, Tensor]], experts: StoredExperts = StoredExperts.APART
) -> Iterator[tuple[str, Tensor]]:
    """Split fused expert tensors into the per-expert matrices of a checkpoint (as views); pass other tensors through.

    Args:
        experts: form in the checkpoint. `WHOLE` keeps the tensors, `MIXTRAL` also renames routers and experts.
    """
    renamed = mixtral_name if experts is StoredExperts.MIXTRAL else str
    for name, weight in named_weights:
        parts = [] if experts is StoredExperts.WHOLE else expert_parts(name, tuple(weight.shape))
        if not parts:
            yield renamed(name), weight
        for part in parts:
            yield renamed(part.name), weight[part.expert, part.first_row : part.first_row + part.num_rows]


def prediction_prefixes(config_json: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the name prefixes of the MTP layers' weights (DeepSeek-V3 and the families that follow its names).

    MTP layers are numbered after the model's layers. transformers 5.12.1 does not implement them.
    """
    first, number = config_json.get("num_hidden_layers"), config_json.get("num_nextn_predict_layers")
    return tuple(f"model.layers.{first + depth}." for depth in range(number or 0)) if first is not None else ()
