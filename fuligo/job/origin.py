"""Origin of a run: the beginning, or the checkpoint that it resumes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from fuligo.checkpoint.location import (
    Checkpoint,
    WeightsOnly,
    find_iteration,
    iteration_of,
    resolve,
    value_weights_directory,
    weights_directory,
)
from fuligo.checkpoint.state import DriverRng, RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.config import Config
from fuligo.observability.run_directory import CHECKPOINTS


@dataclass(slots=True, frozen=True)
class Origin:
    """Step, version and weights from which a run starts or resumes."""

    step: int
    policy_version: int
    initial_weights: Path
    """Weights that the trainer loads; it then restores `checkpoint`, if there is one."""
    checkpoint: Path | None
    """Directory of the resumed checkpoint; None at the beginning."""
    state: RunState | None
    """State in the resumed checkpoint; None at the beginning."""
    rng: DriverRng = field(default_factory=DriverRng.capture)
    """Random state of the driver at this origin."""

    @classmethod
    def find(cls, config: Config) -> Origin:
        """Determine the origin from `--load` and the flags for the initial weights.

        Raises CheckpointError if `--load` holds no checkpoint that can be resumed, or a damaged one.
        """
        load = config.checkpoint.load
        found = resolve(Path(load) if load is not None else None, config.checkpoint.ckpt_step)
        assert config.initial_weights_path is not None, "validated: a run has initial weights"
        first = weights_directory(Path(config.initial_weights_path))
        if isinstance(found, Checkpoint):
            state = RunState.read(found.directory)
            return cls(state.step, state.policy_version, first, found.directory, state, state.rng)
        weights = found.directory if isinstance(found, WeightsOnly) else first
        return cls(0, 0, weights, None, None)

    def after_saving_to(self, store: CheckpointStore) -> Origin:
        """Return the origin at the newest checkpoint that the run has saved to `store`; this origin if it has saved none."""
        if store.newest is None:
            return self
        found = find_iteration(store.directory, store.newest)
        state = RunState.read(found.directory)
        return replace(self, step=state.step, policy_version=state.policy_version, checkpoint=found.directory, state=state, rng=state.rng)

    def may_cut_back(self, config: Config, run_dir: Path) -> bool:
        """Return whether this run may replace recorded steps: those after its checkpoint, or all of them if nothing was saved.

        A run that starts from scratch because of another `--load`, perhaps a misspelled one, must not replace a finished run.
        """
        load = config.checkpoint.load
        save = save_directory(config, run_dir)
        return load is not None and (self.checkpoint is not None or Path(load).resolve() == save.resolve())

    def weights_to_read(self, config: Config) -> list[Path]:
        """Return the directories that the trainer reads: initial weights, checkpoint to resume, reference, teacher and value model."""
        reference = config.initial_weights_path if config.needs_reference else None
        teacher, critic = config.algorithm.opd_teacher_load, config.checkpoint.critic_load
        weights = [self.initial_weights, *([] if self.checkpoint is None else [self.checkpoint])]
        if reference is not None:
            weights.append(weights_directory(Path(reference)))
        if teacher is not None:
            weights.append(Path(teacher))
        if critic is not None and config.trains_values:
            weights.append(value_weights_directory(Path(critic)))
        return weights


def save_directory(config: Config, run_dir: Path) -> Path:
    """Return the directory of the run's checkpoints: --save, or `checkpoints/` in the run directory."""
    return Path(config.checkpoint.save or run_dir / CHECKPOINTS)


def named_checkpoints(config: Config, save: Path) -> frozenset[int]:
    """Return the iterations below `save` that flags refer to. They are never deleted to save space, so that the command can be repeated."""
    flags, save = config.checkpoint, save.resolve()
    named = {flags.ckpt_step} if flags.load is not None and Path(flags.load).resolve() == save else set()
    given = (config.model.hf_checkpoint, flags.load, flags.ref_load, flags.critic_load, config.algorithm.opd_teacher_load)
    for path in (Path(path).resolve() for path in given if path is not None):
        if path != save and path.is_relative_to(save):
            named.add(iteration_of(path.relative_to(save).parts[0]))
    return frozenset(number for number in named if number is not None)
