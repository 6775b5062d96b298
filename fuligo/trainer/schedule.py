"""Learning rate of every optimizer step. Pure."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True, frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then constant, or a decay to `minimum` that ends after `decay_steps` and stays there."""

    peak: float
    minimum: float = 0.0
    style: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    """Optimizer steps from the start of training, warm-up included, until `minimum`."""

    def at(self, step: int) -> float:
        """Return the learning rate of the 0-based optimizer step; the warm-up's first step already has peak / (warmup_steps + 1)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.style == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        share = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.minimum + (self.peak - self.minimum) * share
