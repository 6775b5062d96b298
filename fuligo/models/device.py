"""Resolution of `--device auto` and `--precision auto`."""

from typing import Literal

from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.errors import ConfigError

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


def resolve_device(config: Config) -> Device:
    """Return a run's device; `auto` is CUDA if torch finds it. Raises ConfigError if CUDA is requested but missing, except with Ray."""
    import torch

    asked = config.cluster.device
    if asked != "auto" and chosen_launcher(config) == "ray":
        return asked  # trainer and engines may run on other machines
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu, or auto")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def resolve_precision(asked: Literal["auto", "fp32", "bf16"], device: Device) -> Precision:
    """Return the precision of a run; `auto` is bf16 on CUDA and fp32 on a CPU."""
    if asked == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return asked
