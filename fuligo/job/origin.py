"""Origin of a run: the beginning, or the checkpoint that it resumes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fuligo.checkpoint.location import Checkpoint, WeightsOnly, resolve, value_weights_directory, weights_directory
from fuligo.checkpoint.state import RunState
from fuligo.config import Config
from fuligo.observability.run_directory import CHECKPOINTS


@dataclass(slots=True, frozen=True)
class Origin:
    """Step, version and weights from which a run starts or resumes."""

    step: int
    policy_version: int
    initial_weights: Path
    """Hugging Face directory or distributed checkpoint."""
    checkpoint: Path | None
    """Directory of the resumed checkpoint."""
    state: RunState | None

    @classmethod
    def find(cls, config: Config) -> Origin:
        """Find the origin from `--load` and the flags of the first weights.

        Raises:
            CheckpointError: `--load` cannot be resumed, or `--ref-load` has damaged checkpoints
        """
        load = config.checkpoint.load
        found = resolve(Path(load) if load is not None else None, config.checkpoint.ckpt_step)
        assert config.initial_weights_path is not None, "validated: a run has initial weights"
        first = weights_directory(Path(config.initial_weights_path))
        if isinstance(found, Checkpoint):
            state = found.state()
            return cls(state.step, state.policy_version, first, found.directory, state)
        weights = found.directory if isinstance(found, WeightsOnly) else first
        return cls(0, 0, weights, None, None)

    def may_cut_back(self, config: Config, run_dir: Path) -> bool:
        """Return whether this run may replace recorded steps: those after its checkpoint, or all where nothing was saved.

        A run that starts anew because of another `--load`, perhaps a misspelt one, must not replace a finished run.
        """
        load = config.checkpoint.load
        save = save_directory(config, run_dir)
        return load is not None and (self.checkpoint is not None or Path(load).resolve() == save.resolve())

    def weights_to_read(self, config: Config) -> list[Path]:
        """Return the directories of all weights that the trainer loads: policy, teacher and value model."""
        teacher, critic = config.algorithm.opd_teacher_load, config.checkpoint.critic_load
        weights = [self.initial_weights]
        if teacher is not None:
            weights.append(Path(teacher))
        if critic is not None and config.trains_values:
            weights.append(value_weights_directory(Path(critic)))
        return weights


def save_directory(config: Config, run_dir: Path) -> Path:
    """Return the directory that the run saves its checkpoints to."""
    return Path(config.checkpoint.save or run_dir / CHECKPOINTS)
