"""Where a run starts from: what `--load` and `--ckpt-step` mean on a given directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fuligo.checkpoint.state import RunState
from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import COUNTERS, RELEASE, TRACKER, UNFINISHED, VALUE_MODEL, is_distributed
from fuligo.formats.file_manifest import MANIFEST, check_manifest

_REPLACED = ".replaced_"
_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A whole checkpoint; its files were compared with its manifest."""

    directory: Path
    iteration: int
    """Complete rollouts."""

    def state(self) -> RunState:
        """
        Raises:
            CheckpointError: another version of fuligo wrote it.
        """
        return RunState.read(self.directory)


@dataclass(slots=True, frozen=True)
class WeightsOnly:
    """A Hugging Face directory or a distributed checkpoint: first weights; step 0 and a fresh optimizer."""

    directory: Path


def resolve(load: Path | None, ckpt_step: int | None = None) -> Checkpoint | WeightsOnly | None:
    """What a run starts from; None is a fresh start from `--ref-load`.

    A directory that is missing or empty starts afresh, so that one command both starts and resumes a run.

    Raises:
        CheckpointError: it holds something else than checkpoints, the iteration is not there, or its files are damaged.
    """
    if load is None or not _entries(load):
        if ckpt_step is not None:
            raise CheckpointError(f"--ckpt-step {ckpt_step}: {_nothing(load)}; give by --load the directory that has it")
        return None
    if ckpt_step is not None:
        return find_iteration(load, ckpt_step)
    tracker = load / TRACKER
    if not tracker.exists() and _has_weights(load):
        return WeightsOnly(load)
    if tracker.exists() and tracker.read_text().strip() == RELEASE:
        return _release(load)
    iteration = newest_iteration(load)
    if iteration is None:
        raise CheckpointError(f"--load {load} is neither empty nor a Hugging Face directory and has no {TRACKER}; {_meant(load)}")
    return find_iteration(load, iteration)


def nothing_left(checkpoint: Path | None, step: int, num_rollout: int) -> str | None:
    """Why a run of `num_rollout` rollouts has none to do after `step` complete ones; None where some are left."""
    if step < num_rollout:
        return None
    return f"{checkpoint} is complete: {step} of {num_rollout} rollouts are done; raise --num-rollout to go on"


def weights_directory(given: Path) -> Path:
    """The weights that `--ref-load` stands for: of a directory of checkpoints those of the newest; else its own.

    Returns:
        A Hugging Face directory or a distributed checkpoint, or what is neither, as given.

    Raises:
        CheckpointError: it has a tracker, and what that names is missing or damaged.
    """
    if not (given / TRACKER).is_file():
        return given
    if (given / TRACKER).read_text().strip() == RELEASE:
        return _release(given).directory
    iteration = newest_iteration(given)
    assert iteration is not None, "there is a tracker"
    return weights_of(find_iteration(given, iteration).directory)


def value_weights_directory(given: Path) -> Path:
    """The weights that `--critic-load` stands for: as `weights_directory`, but of a checkpoint the value model's where it has one.

    Raises:
        CheckpointError: it has a tracker, and what that names is missing or damaged.
    """
    weights = weights_directory(given)
    saved = (weights if is_distributed(weights) else weights.parent) / VALUE_MODEL
    return saved if weights != given and saved.is_dir() else weights


def training_checkpoint(given: Path) -> Path | None:
    """The checkpoint of a trainer that is given: itself, or in a directory of them the newest; None where there are weights alone.

    Raises:
        CheckpointError: it has a tracker, and what that names is missing or damaged.
    """
    weights = weights_directory(given)
    checkpoint = weights if weights == given or is_distributed(weights) else weights.parent
    return checkpoint if (checkpoint / COUNTERS).is_file() else None


def saved_value_model(checkpoint: Path | None) -> Path | None:
    """Its weights in a training checkpoint; None where there are none."""
    directory = None if checkpoint is None else checkpoint / VALUE_MODEL
    return directory if directory is not None and directory.is_dir() else None


def weights_of(checkpoint: Path) -> Path:
    """Of one checkpoint: the Megatron trainer's is a distributed one, the torch trainer's has a Hugging Face directory."""
    return checkpoint if is_distributed(checkpoint) else checkpoint / "hf"


def newest_iteration(directory: Path) -> int | None:
    """The iteration that the tracker names.

    Without a tracker, a single iteration is the first one of a run that was killed before it wrote the tracker.

    Raises:
        CheckpointError: the tracker holds no iteration.
    """
    try:
        text = (directory / TRACKER).read_text().strip()
    except FileNotFoundError:
        only = iterations(directory)
        whole = len(only) == 1 and (directory / iteration_name(only[0]) / MANIFEST).exists()
        return only[0] if whole else None
    if not text.isdecimal():
        raise CheckpointError(f"{directory / TRACKER} holds {text!r}; it must hold the number of an iteration or {RELEASE!r}")
    return int(text)


def find_iteration(directory: Path, iteration: int) -> Checkpoint:
    """
    Raises:
        CheckpointError: it is not there (the text lists those that are), or damaged.
    """
    for name in (iteration_name(iteration), replaced_name(iteration)):
        if (directory / name).is_dir():
            check_manifest(directory / name)
            return Checkpoint(directory / name, iteration)
    there = ", ".join(str(known) for known in iterations(directory)) or "none"
    raise CheckpointError(f"{directory} has no iteration {iteration}; there: {there}; choose one with --ckpt-step")


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def replaced_name(iteration: int) -> str:
    """Where an earlier checkpoint of the same iteration waits until its successor is in place."""
    return f"{_REPLACED}{iteration_name(iteration)}"


def iterations(directory: Path) -> list[int]:
    """Those there, ascending."""
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _ITERATION.fullmatch(entry.name)))


def replaced_iterations(directory: Path) -> list[int]:
    names = (entry.name.removeprefix(_REPLACED) for entry in directory.glob(f"{_REPLACED}*"))
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def _entries(directory: Path) -> list[Path]:
    """What counts: not the leftovers of a crash."""
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise CheckpointError(f"--load {directory} is a file; give a directory of checkpoints or a Hugging Face directory")
    return [entry for entry in directory.iterdir() if not entry.name.startswith(UNFINISHED)]


def _is_hugging_face(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _has_weights(directory: Path) -> bool:
    return _is_hugging_face(directory) or is_distributed(directory)


def _meant(load: Path) -> str:
    """What to give instead of one checkpoint, of a whole run directory, or of something else."""
    if (iteration := _ITERATION.fullmatch(load.name)) is not None:
        return f"it is one checkpoint: give the directory that holds it, --load {load.parent} --ckpt-step {int(iteration[1])}"
    if (inside := next(load.glob(f"*/{TRACKER}"), None)) is not None:
        return f"the checkpoints are inside: give --load {inside.parent}"
    return "give a directory of checkpoints, or an empty one to start afresh"


def _nothing(load: Path | None) -> str:
    return "--load is not given" if load is None else f"--load {load} is empty"


def _release(load: Path) -> WeightsOnly:
    directory = load / RELEASE
    if not _has_weights(directory):
        raise CheckpointError(
            f"{load / TRACKER} says {RELEASE!r}, but {directory} is no Hugging Face directory with config.json and safetensors, and no "
            "distributed checkpoint with .metadata"
        )
    if (directory / MANIFEST).exists():
        check_manifest(directory)
    return WeightsOnly(directory)
