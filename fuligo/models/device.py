"""Device and precision of a run, resolved where it starts."""

from typing import Literal

from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.errors import ConfigError

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


def resolve_device(config: Config) -> Device:
    """Resolve `--device auto` by what this machine has. Raises ConfigError if CUDA was requested and there is none."""
    import torch

    asked = config.cluster.device
    if asked != "auto" and chosen_launcher(config) == "ray":
        return asked  # the nodes have it, whatever this machine has
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu, or auto")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def resolve_precision(asked: Literal["auto", "fp32", "bf16"], device: Device) -> Precision:
    """Resolve `auto`: bf16 on CUDA, fp32 on a CPU."""
    if asked == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return asked
