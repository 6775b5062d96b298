"""Rubrics: rewards that are weighted sums of named parts."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Score:
    """Reward, and the parts that it consists of."""

    reward: float
    metrics: Mapping[str, float]
    """`reward/<part>` before weighting, for `Step.metrics`."""


class Rubric:
    """Weights of the parts of a reward: `Rubric(correct=1.0, brevity=0.1).score(correct=1, brevity=0.4)`."""

    def __init__(self, **weights: float) -> None:
        self.weights = weights

    def score(self, **parts: float) -> Score:
        """Return the weighted sum of the parts, and each part as a metric. Raises ValueError if the names are not those of the weights."""
        if parts.keys() != self.weights.keys():
            raise ValueError(f"cannot score: the parts are {sorted(parts)}, but the rubric has {sorted(self.weights)}; pass exactly these")
        total = sum(weight * parts[name] for name, weight in self.weights.items())
        return Score(total, {f"reward/{name}": float(value) for name, value in parts.items()})
