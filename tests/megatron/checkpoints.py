"""Tiny checkpoints in which every weight matters: no norm, bias or router correction is one or zero."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import tiny


def uneven_model(family: str, *, layers: int = 2, seed: int = 0, **overrides: object) -> Any:
    """Return a transformers model in float32."""
    lm = tiny.model(family, layers=layers, seed=seed, **overrides)
    perturb(lm)
    return lm


@torch.no_grad()
def perturb(module: torch.nn.Module) -> None:
    """Change the weights that transformers initializes to ones and zeros."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if "norm" in name or name.endswith((".bias", "e_score_correction_bias")):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)


def save_uneven(directory: Path, family: str, **overrides: Any) -> Path:
    """Save a Hugging Face directory."""
    tiny.save_as_published(uneven_model(family, **overrides), directory, family)
    return directory


def expert_by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a transformers model, with separate experts under the names of published files."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), own.chunk(2)) if kind == "gate_up_proj" else [(kind, own)]
            found |= {f"{prefix}.{expert}.{part}.weight": values for part, values in parts}
    return found
