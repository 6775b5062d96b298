"""Names of the files and directories of a checkpoint. Pure Python."""

from __future__ import annotations

from pathlib import Path

from fuligo.formats.model_files import MODEL_FILES

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Tracker content and directory name of a checkpoint with weights only, as conversion tools write it."""
UNFINISHED = ".tmp_"
"""Prefix of files and directories that are being written or removed; the next start deletes those that a crash left."""
LOCK = ".lock"
"""File that the run which saves to a directory of checkpoints holds locked."""
VALUE_MODEL = "critic"
"""Directory of the value model's weights in a checkpoint."""
COUNTERS = "trainer.json"
"""File with the trainer's progress counters in a checkpoint."""


def is_distributed(directory: Path) -> bool:
    """Return True if `directory` itself is a distributed checkpoint (not a directory of checkpoints)."""
    return (directory / ".metadata").is_file()


def model_directory(weights: Path) -> Path:
    """Return the directory that holds config.json and the tokenizer of these weights."""
    return weights / MODEL_FILES if is_distributed(weights) else weights


def no_value_model(checkpoint: Path) -> str:
    """Return the error for a run that trains a value model from a checkpoint without one."""
    return (
        f"cannot resume {checkpoint} with --advantage-estimator ppo: the checkpoint has no value model; give its initial weights with "
        "--critic-load DIR (a Hugging Face directory of the policy's architecture), or resume with the checkpoint's estimator"
    )
