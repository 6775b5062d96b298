"""Data types of weights: in the model's passes, and as sent to the engines."""

import torch

from fuligo.trainer.ranks.settings import TrainerSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By the names in the settings."""


def sync_dtype(settings: TrainerSettings, of_checkpoint: torch.dtype) -> torch.dtype:
    """Return the data type in which engines receive the weights: that of the settings, else that of `hf_checkpoint`."""
    return of_checkpoint if settings.sync_dtype is None else DTYPES[settings.sync_dtype]
