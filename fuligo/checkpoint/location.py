"""Resolution of `--load`, `--ckpt-step` and `--ref-load` to the checkpoint or weights that a run starts from."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER, adapter_directory, is_adapter
from fuligo.formats.checkpoint_files import COUNTERS, LOCK, RELEASE, TRACKER, UNFINISHED, VALUE_MODEL, is_distributed
from fuligo.formats.disk import MANIFEST, check_manifest, unreadable_files
from fuligo.quantities import count

_REPLACED = ".replaced_"
_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """Complete checkpoint whose files match its manifest."""

    directory: Path
    iteration: int
    """Number of complete rollouts."""


@dataclass(slots=True, frozen=True)
class WeightsOnly:
    """Weights alone (a Hugging Face directory or a distributed checkpoint), from which a run starts at step 0 with a fresh optimizer."""

    directory: Path


def resolve(load: Path | None, ckpt_step: int | None = None) -> Checkpoint | WeightsOnly | None:
    """Return the checkpoint or weights in `--load` that a run starts from; None for a fresh start from `--ref-load`.

    A missing or empty directory means a fresh start, so that the same command both starts and resumes a run. Raises CheckpointError if the
    directory contains neither checkpoints nor weights, lacks the iteration `ckpt_step` (None: the newest), or is damaged.
    """
    if load is None or not _entries(load):
        if ckpt_step is not None:
            state = "not given" if load is None else f"missing or empty: {load}"
            raise CheckpointError(f"cannot load --ckpt-step {ckpt_step}: --load is {state}; use the directory that has this iteration")
        return None
    if ckpt_step is not None:
        return find_iteration(load, ckpt_step)
    _require_plain_files(load)
    tracker = load / TRACKER
    if not tracker.exists() and _has_weights(load):
        return WeightsOnly(load)
    if tracker.exists() and tracker.read_text().strip() == RELEASE:
        return _release(load)
    iteration = newest_iteration(load)
    if iteration is None:
        raise CheckpointError(
            f"cannot resume from --load {load}: it has no {TRACKER} and is not a Hugging Face directory; {_suggestion(load)}"
        )
    return find_iteration(load, iteration)


def nothing_left(checkpoint: Path | None, step: int, num_rollout: int) -> str | None:
    """Return an error message if no rollouts are left for a run of `num_rollout` rollouts that resumes after `step` of them; else None."""
    if step < num_rollout:
        return None
    return f"cannot resume {checkpoint}: the run is complete ({step} of {count(num_rollout, 'rollout')}); raise --num-rollout to continue"


def weights_directory(given: Path) -> Path:
    """Return the directory of the weights at `given` (`--ref-load`): those of its newest checkpoint, or `given` itself if it has none."""
    if not given.is_dir():
        return given
    _require_plain_files(given)
    if not (given / TRACKER).exists():
        return given
    if (given / TRACKER).read_text().strip() == RELEASE:
        return _release(given).directory
    iteration = newest_iteration(given)
    assert iteration is not None, "a tracker exists"
    return weights_of(find_iteration(given, iteration).directory)


def value_weights_directory(given: Path) -> Path:
    """Return the directory of the weights at `--critic-load`: the newest checkpoint's value model, else as `weights_directory`."""
    weights = weights_directory(given)
    saved = (weights if is_distributed(weights) else weights.parent) / VALUE_MODEL
    return saved if weights != given and saved.is_dir() else weights


def training_checkpoint(given: Path) -> Path | None:
    """Return the training checkpoint at `given`, or the newest one in a directory of checkpoints; None if there are only weights."""
    weights = weights_directory(given)
    checkpoint = weights if weights == given or is_distributed(weights) else weights.parent
    return checkpoint if (checkpoint / COUNTERS).is_file() else None


def saved_value_model(checkpoint: Path | None) -> Path | None:
    """Return the directory of the value model in a training checkpoint; None if it has no value model."""
    directory = None if checkpoint is None else checkpoint / VALUE_MODEL
    return directory if directory is not None and directory.is_dir() else None


def weights_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's weights: itself (Megatron trainer), `hf` in it (torch trainer), or `adapter` in it (LoRA)."""
    if is_adapter(checkpoint / ADAPTER):
        return adapter_directory(checkpoint)
    return checkpoint if is_distributed(checkpoint) else checkpoint / "hf"


def newest_iteration(directory: Path) -> int | None:
    """Return the iteration in the tracker file.

    Without a tracker, return the iteration of the only checkpoint if it is complete, because the run was killed before it wrote the
    tracker; else None. Raises CheckpointError if the tracker does not contain an iteration.
    """
    try:
        text = (directory / TRACKER).read_text().strip()
    except FileNotFoundError:
        only = iterations(directory)
        whole = len(only) == 1 and (directory / iteration_name(only[0]) / MANIFEST).exists()
        return only[0] if whole else None
    if not text.isdecimal():
        raise CheckpointError(
            f"cannot read {directory / TRACKER}: it holds {text!r} instead of an iteration number or {RELEASE!r}; correct it"
        )
    return int(text)


def find_iteration(directory: Path, iteration: int) -> Checkpoint:
    """Check a checkpoint's manifest and return the checkpoint.

    Raises CheckpointError if the checkpoint is damaged or missing; if missing, the error lists the existing iterations.
    """
    for name in (iteration_name(iteration), replaced_name(iteration)):
        if (directory / name).is_dir():
            for part in (directory / name, *(each for each in (directory / name).iterdir() if each.is_dir())):
                _require_plain_files(part)
            check_manifest(directory / name)
            return Checkpoint(directory / name, iteration)
    there = ", ".join(str(known) for known in iterations(directory))
    found = f"it has {there}; choose one with --ckpt-step" if there else "it has no checkpoint; use another directory"
    raise CheckpointError(f"cannot load iteration {iteration} from {directory}: {found}")


def iteration_of(name: str) -> int | None:
    """Return the iteration in a checkpoint directory's name; None for other names."""
    match = _ITERATION.fullmatch(name)
    return None if match is None else int(match[1])


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def replaced_name(iteration: int) -> str:
    """Return the temporary name of an old checkpoint while a new one of the same iteration replaces it."""
    return f"{_REPLACED}{iteration_name(iteration)}"


def iterations(directory: Path) -> list[int]:
    """Return the iterations of the checkpoints in `directory`, ascending."""
    return sorted(found for entry in directory.iterdir() if (found := iteration_of(entry.name)) is not None)


def replaced_iterations(directory: Path) -> list[int]:
    names = (entry.name.removeprefix(_REPLACED) for entry in directory.glob(f"{_REPLACED}*"))
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def _require_plain_files(directory: Path) -> None:
    """Raise CheckpointError if a directory contains a pipe, socket or device, because reading it could block."""
    for problem in unreadable_files(directory, math.inf):
        raise CheckpointError(f"cannot load from {directory}: {problem}")


def _entries(directory: Path) -> list[Path]:
    """Return the entries of `directory`, except its lock and leftovers of a crash. Raises CheckpointError if it is a file."""
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise CheckpointError(
            f"cannot load from {directory}: it is a file; use --load with a directory of checkpoints or a Hugging Face directory"
        )
    return [entry for entry in directory.iterdir() if entry.name != LOCK and not entry.name.startswith(UNFINISHED)]


def _has_weights(directory: Path) -> bool:
    return is_distributed(directory) or ((directory / "config.json").is_file() and any(directory.glob("*.safetensors")))


def _suggestion(load: Path) -> str:
    """Return the fix for an error message: the directory that the user probably meant."""
    if (iteration := _ITERATION.fullmatch(load.name)) is not None:
        return f"it is a single checkpoint; use --load {load.parent} --ckpt-step {int(iteration[1])}"
    if (inside := next(load.glob(f"*/{TRACKER}"), None)) is not None:
        return f"use --load {inside.parent}, which holds the checkpoints"
    return "use a directory of checkpoints, or an empty one for a fresh start"


def _release(load: Path) -> WeightsOnly:
    """Return the weights that a conversion wrote to `load`. Raises CheckpointError if they are missing or damaged."""
    directory = load / RELEASE
    if not _has_weights(directory):
        raise CheckpointError(
            f"cannot load {load}: {TRACKER} says {RELEASE!r}, but {directory} is not a Hugging Face directory (config.json, safetensors) "
            "or a distributed checkpoint (.metadata); copy or convert the weights again"
        )
    if (directory / MANIFEST).exists():
        check_manifest(directory)
    return WeightsOnly(directory)
