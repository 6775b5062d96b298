"""Counters of a trainer's checkpoint (`trainer.json`)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fuligo.errors import CheckpointError
from fuligo.layout.megatron import Layout
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
    """Counters of the value model; None without one, and in Megatron's checkpoints, where that has a file of its own."""
    layout: Layout | None = None
    """Layout of the ranks of the Megatron trainer; None: the torch trainer wrote the file."""

    def write(self, file: Path, num_ranks: int) -> None:
        content: dict[str, Any] = {"format": FORMAT, "num_ranks": num_ranks, **asdict(self.progress)}
        if self.base_digest is not None:
            content["base_digest"] = self.base_digest
        if self.critic is not None:
            content["critic"] = asdict(self.critic)
        if self.layout is not None:
            content |= {"backend": "megatron", "layout": asdict(self.layout)}
        file.write_text(json.dumps(content, indent=2))

    @classmethod
    def read(cls, file: Path, backend: str) -> Self:
        """Read the file of a trainer, `torch` or `megatron`. Raises CheckpointError if it is damaged, or of another trainer or format."""
        try:
            content = json.loads(file.read_text())
            version, written_by = content["format"], content.get("backend", "torch")
            if (version, written_by) != (FORMAT, backend):
                raise CheckpointError(
                    f"cannot read {file}: it has format {version} of the {written_by} trainer, but this run reads format {FORMAT} of the "
                    f"{backend} trainer; use the trainer and the version of fuligo that wrote it"
                )
            critic, layout = content.get("critic"), content.get("layout")
            return cls(
                _progress(content),
                content.get("base_digest"),
                None if critic is None else _progress(critic),
                None if layout is None else Layout(**layout),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"cannot read {file}: {reason}; the checkpoint is damaged, load another") from error


def _progress(fields: dict[str, int]) -> Progress:
    return Progress(int(fields["num_optimizer_steps"]), int(fields["num_rollouts"]))
