"""Parameters: data types, a check of loaded weights, and selection of the parameters to train by regular expressions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

from fuligo.errors import CheckpointError, ConfigError
from fuligo.trainer.ranks.settings import TrainedParameters, TrainerSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Data types by their names in the settings."""


def sync_dtype(settings: TrainerSettings, of_checkpoint: torch.dtype) -> torch.dtype:
    """Return the data type in which engines receive the weights: that of the settings or, if None, `of_checkpoint`."""
    return of_checkpoint if settings.sync_dtype is None else DTYPES[settings.sync_dtype]


def require_finite_weights(tensors: Iterable[tuple[str, torch.Tensor]], source: Path) -> None:
    """Raise CheckpointError for the first loaded tensor with NaN or infinities, in one pass over each, without a mask of its size."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.detach().aminmax()).isfinite().all():
            number = int((~tensor.isfinite()).sum())
            raise CheckpointError(
                f"cannot load {source}: {name} has values that are NaN or infinite ({number:,} of {tensor.numel():,}); "
                "copy or download it again, or load another checkpoint"
            )


def trained_names(names: Mapping[str, Sequence[str]], trained: TrainedParameters) -> set[str]:
    """Return the names of the parameters to train.

    Args:
        names: for each parameter, the names that a regular expression may match.

    Raises:
        ConfigError: both lists are given, an expression is malformed or matches nothing, or no parameter is left to train.
    """
    if trained.only and trained.frozen:
        raise ConfigError("--only-train-params-name-list and --freeze-params-name-list cannot be combined; use one of them")
    if not (trained.only or trained.frozen):
        return set(names)
    flag = "--only-train-params-name-list" if trained.only else "--freeze-params-name-list"
    every = set(chain.from_iterable(names.values()))
    matching = {name for pattern in trained.only or trained.frozen for name in _matching(pattern, every, flag)}
    found = {name for name, aliases in names.items() if not matching.isdisjoint(aliases)}
    chosen = found if trained.only else set(names) - found
    if not chosen:
        raise ConfigError(f"{flag} leaves no parameter to train; freeze fewer parameters")
    return chosen


def require_trained_mtp(parameters: Iterable[torch.nn.Parameter], trained: TrainedParameters) -> None:
    """Require that some parameters of the MTP layers are trained; otherwise an MTP loss that is detached from the model trains nothing.

    Raises ConfigError if `trained` freezes all of them.
    """
    if not any(parameter.requires_grad for parameter in parameters):
        flag = "--only-train-params-name-list" if trained.only else "--freeze-params-name-list"
        raise ConfigError(
            f"cannot train MTP layers with --enable-mtp-training: {flag} freezes all their parameters; drop --enable-mtp-training, or "
            "train parameters of these layers"
        )


def _matching(pattern: str, names: Iterable[str], flag: str) -> list[str]:
    try:
        matching = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ConfigError(f"{flag}: {pattern!r} is not a regular expression ({error}); correct the pattern") from error
    if not matching:
        examples = ", ".join(sorted(names)[:3])
        raise ConfigError(f"{flag}: {pattern!r} matches no parameter of the model; its parameters are named {examples}, ...")
    return matching
