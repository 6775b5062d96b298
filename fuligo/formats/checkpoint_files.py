"""Names of the files and directories of a checkpoint. Pure Python."""

from __future__ import annotations

from pathlib import Path

from fuligo.formats.model_files import MODEL_FILES

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Tracker and directory of weights alone, as conversion tools write them."""
UNFINISHED = ".tmp_"
"""What starts so is being written or removed; a crash leaves it, the next start clears it."""
VALUE_MODEL = "critic"
"""In a checkpoint: the directory of the value model's weights."""
COUNTERS = "trainer.json"
"""In a checkpoint of either trainer: how far it had come."""


def is_distributed(directory: Path) -> bool:
    """It is a distributed checkpoint itself, not a directory of them."""
    return (directory / ".metadata").is_file()


def model_directory(weights: Path) -> Path:
    """Where config.json and the tokenizer of such weights are."""
    return weights / MODEL_FILES if is_distributed(weights) else weights


def no_value_model(checkpoint: Path) -> str:
    """What to do where a value model is to be trained and the checkpoint has none."""
    return (
        f"{checkpoint}: has no value model, and --advantage-estimator ppo trains one. Give --critic-load DIR with the weights that it is "
        "to begin with here (a Hugging Face directory of the policy's architecture), or resume with the checkpoint's estimator."
    )
