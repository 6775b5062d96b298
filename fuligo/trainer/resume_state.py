"""State that a resumed trainer needs besides weights and moments: counters (`trainer.json`), and a random state per rank."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import COUNTERS
from fuligo.formats.disk import default_mode
from fuligo.layout.megatron import Layout
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress

FORMAT = 1
"""Version of the checkpoint format."""


@dataclass(slots=True, frozen=True)
class Counters:
    """Contents of `trainer.json`."""

    progress: Progress
    base_digest: str | None = None
    """Digest of the adapter's base weights; None without an adapter."""
    critic: Progress | None = None
    """Counters of the value model; None without one, and in Megatron's checkpoints, where the value model has its own file."""
    layout: Layout | None = None
    """Layout of the ranks of the Megatron trainer; None: the torch trainer wrote the file."""

    def write(self, directory: Path, num_ranks: int) -> None:
        content: dict[str, Any] = {"format": FORMAT, "num_ranks": num_ranks, **asdict(self.progress)}
        if self.base_digest is not None:
            content["base_digest"] = self.base_digest
        if self.critic is not None:
            content["critic"] = asdict(self.critic)
        if self.layout is not None:
            content |= {"backend": "megatron", "layout": asdict(self.layout)}
        (directory / COUNTERS).write_text(json.dumps(content, indent=2))

    @classmethod
    def read(cls, directory: Path, backend: str) -> Self:
        """Read the file of a trainer, `torch` or `megatron`. Raises CheckpointError if it is damaged, or of another trainer or format."""
        file = directory / COUNTERS
        try:
            content = json.loads(file.read_text())
            version, written_by = content["format"], content.get("backend", "torch")
            if (version, written_by) != (FORMAT, backend):
                raise CheckpointError(
                    f"cannot read {file}: it has format {version} of the {written_by} trainer, but this run reads format {FORMAT} of the "
                    f"{backend} trainer; use the trainer and the version of fuligo that wrote it"
                )
            critic = content.get("critic")
            return cls(
                _progress(content),
                content.get("base_digest"),
                None if critic is None else _progress(critic),
                Layout(**content["layout"]) if backend == "megatron" else None,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"cannot read {file}: {reason}; the checkpoint is damaged, load another") from error


def _progress(fields: dict[str, Any]) -> Progress:
    # Checkpoints of older versions have no count of skipped steps.
    return Progress(int(fields["num_optimizer_steps"]), int(fields["num_rollouts"]), int(fields.get("num_skipped_steps", 0)))


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
