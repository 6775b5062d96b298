"""The data types of weights: of the passes through a model, and on the way to the engines."""

from __future__ import annotations

import torch

from fuligo.trainer.ranks.settings import TrainerSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By the names that settings give them."""


def sync_dtype(settings: TrainerSettings, of_checkpoint: torch.dtype) -> torch.dtype:
    """In which engines get the weights: as the settings say, or else as `hf_checkpoint` has them."""
    return of_checkpoint if settings.sync_dtype is None else DTYPES[settings.sync_dtype]
