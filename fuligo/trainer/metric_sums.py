"""Metrics of an optimizer step as sums, so that means do not depend on how the step was cut into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from fuligo.errors import TrainerError


@dataclass(slots=True)
class MetricSums:
    """Scalars, detached, that add up over a step's micro-batches and ranks. Divide once, at the end, by `means`."""

    shares: dict[str, Tensor]
    """The micro-batch's share of a value of the whole step (loss terms): shares add up to it."""
    totals: dict[str, Tensor]
    """sum_t weight_t * x_t of a quantity whose mean over the step is wanted."""
    weight: Tensor
    """sum_t weight_t: what `totals` divide by."""

    @classmethod
    @torch.no_grad()
    def of(cls, shares: Mapping[str, Tensor], totals: Mapping[str, Tensor], weights: Tensor) -> MetricSums:
        """Detach everything and weigh `totals`, each [N], token by token.

        Args:
            weights: [N]
        """
        return cls(
            shares={name: share.detach() for name, share in shares.items()},
            totals={name: (weights * values.detach()).sum() for name, values in totals.items()},
            weight=weights.sum(),
        )

    def __add__(self, other: MetricSums) -> MetricSums:
        """Raises:
        TrainerError: the names differ, which only a user's loss can bring about.
        """
        if [*self.shares, *self.totals] != [*other.shares, *other.totals]:
            raise TrainerError(
                f"--custom-loss-function-path returned the metrics {', '.join(self.shares)} for one micro-batch and "
                f"{', '.join(other.shares)} for another; return the same for each, 0 where there is nothing to count"
            )
        return self.with_vector(self.vector() + other.vector())

    def vector(self) -> Tensor:
        """[K] float64: everything in a fixed order, for instance to all-reduce; same settings give the same order on every rank."""
        return torch.stack([*self.shares.values(), *self.totals.values(), self.weight]).double()

    def with_vector(self, vector: Tensor) -> MetricSums:
        """The same names with the values of `vector` [K]."""
        values = iter(vector)
        shares = {name: next(values) for name in self.shares}
        totals = {name: next(values) for name in self.totals}
        return MetricSums(shares, totals, next(values))

    def means(self) -> dict[str, float]:
        """By name: the shares as they are; totals / weight. Totals without weight (nothing to train on) are 0."""
        *values, weight = self.vector().tolist()
        names = [*self.shares, *self.totals]
        divisors = [1.0] * len(self.shares) + [weight or 1.0] * len(self.totals)
        return {name: value / divisor for name, value, divisor in zip(names, values, divisors)}


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, over the optimizer steps that have it: a user's loss may have something to say in some of them only."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: fmean(step[name] for step in steps if name in step) for name in names}
