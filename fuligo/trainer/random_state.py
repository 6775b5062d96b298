"""Random states of the trainer's ranks in a checkpoint, one file per rank."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.disk import default_mode
from fuligo.trainer.ranks.world import World


def write_random_state(directory: Path, world: World, more: Mapping[str, Tensor]) -> None:
    """Write this rank's random state, with the backend's additional tensors `more`, below `directory`, which is created if missing.

    Raises CheckpointError if the file cannot be written, for example because the disk is full.
    """
    state = {"torch": torch.get_rng_state(), **more}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    file = _file(directory, world)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with default_mode(file):
            save_file(state, file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {file}: {error}") from error


def read_random_state(directory: Path, world: World) -> dict[str, Tensor]:
    """Read this rank's file from `write_random_state`. Raises CheckpointError if it is missing or damaged."""
    file = _file(directory, world)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; resume from an intact checkpoint") from error


def has_random_state(directory: Path, world: World) -> bool:
    """Return whether the checkpoint has a random state for this rank; it has none if a run with fewer ranks saved it."""
    return _file(directory, world).exists()


def set_random_state(state: Mapping[str, Tensor], world: World) -> None:
    torch.set_rng_state(state["torch"])
    if world.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)


def _file(directory: Path, world: World) -> Path:
    return directory / "rng" / f"rank_{world.rank:05d}.safetensors"
