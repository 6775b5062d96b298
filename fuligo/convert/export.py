"""--save-hf: the weights of a checkpoint as a Hugging Face directory of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from fuligo.checkpoint.location import weights_of
from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import UNFINISHED, is_distributed
from fuligo.formats.disk import writing
from fuligo.formats.durable import sync, sync_tree


def export(checkpoint: Path, target: Path) -> None:
    """Write `target`, which appears whole or not at all. An export that an earlier run left there is replaced.

    Raises:
        CheckpointError: the checkpoint is damaged; or something else is there, which stays.
        FuligoError: it cannot be written.
    """
    problem = export_problem(target)
    if problem is not None:
        raise CheckpointError(f"--save-hf: {problem}")
    new, old = (target.with_name(f"{UNFINISHED}{state}_{target.name}") for state in ("new", "old"))
    try:
        with writing(target):
            shutil.rmtree(new, ignore_errors=True)  # what a crash left
            _write(checkpoint, new)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            new.rename(target)
            sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def export_problem(target: Path) -> str | None:
    """Why an export may not take the place of what is at `target`; None where it may."""
    if not target.exists() or (target.is_dir() and ((target / "config.json").is_file() or not any(target.iterdir()))):
        return None
    return f"{target} is there and is no Hugging Face directory; give another place, for an export would replace it"


def _write(checkpoint: Path, new: Path) -> None:
    if is_distributed(checkpoint):
        from fuligo.convert.dist_to_hf import dist_to_hf

        dist_to_hf(checkpoint, new)
    else:
        shutil.copytree(weights_of(checkpoint), new)
        sync_tree(new)
