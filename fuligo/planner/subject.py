"""What the planner looks at."""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.config import Config
from fuligo.models.architecture import Architecture
from fuligo.planner.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Subject:
    """A config with the facts of its model and its GPUs."""

    config: Config
    architecture: Architecture
    """Of `--hf-checkpoint`'s config.json, of `--model-config-file`, or of the MODEL_ARGS flags."""
    rollout_architecture: Architecture
    """Of the checkpoint that the engines load (FP8 where `--hf-checkpoint` is); else the same."""
    gpu: Gpu
