"""Metrics of an optimizer step as sums, so that means do not depend on the split into micro-batches and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Self

import torch
from torch import Tensor

from fuligo.errors import TrainerError


@dataclass(slots=True)
class MetricSums:
    """Detached scalars that add up over a step's micro-batches and ranks. `means` divides once, at the end."""

    shares: dict[str, Tensor]
    """The micro-batch's shares of values of the whole step (loss terms), which add up to them."""
    totals: dict[str, Tensor]
    """sum_t weight_t * x_t of a quantity whose mean over the step is wanted."""
    weight: Tensor
    """sum_t weight_t: the denominator of `totals`."""

    @classmethod
    @torch.no_grad()
    def of(cls, shares: Mapping[str, Tensor], totals: Mapping[str, Tensor], weights: Tensor) -> Self:
        """Detach everything and weigh `totals`, each [N], token by token with `weights` [N]."""
        return cls(
            shares={name: share.detach() for name, share in shares.items()},
            totals={name: (weights * values.detach()).sum() for name, values in totals.items()},
            weight=weights.sum(),
        )

    def __add__(self, other: Self) -> Self:
        """Add the sums of another micro-batch or rank.

        Raises:
            TrainerError: the names differ, which only a user's loss can cause.
        """
        if [*self.shares, *self.totals] != [*other.shares, *other.totals]:
            raise TrainerError(
                f"--custom-loss-function-path returned the metrics {', '.join(self.shares)} for one micro-batch and "
                f"{', '.join(other.shares)} for another; return the same for each, 0 where there is nothing to count"
            )
        return self.with_vector(self.vector() + other.vector())

    def vector(self) -> Tensor:
        """Return [K] float64, for instance to all-reduce. The order is fixed: the same settings give the same on every rank."""
        return torch.stack([*self.shares.values(), *self.totals.values(), self.weight]).double()

    def with_vector(self, vector: Tensor) -> Self:
        """Replace the values by those of `vector` [K]."""
        values = iter(vector)
        shares = {name: next(values) for name in self.shares}
        totals = {name: next(values) for name in self.totals}
        return replace(self, shares=shares, totals=totals, weight=next(values))

    def means(self) -> dict[str, float]:
        """Return shares, and totals / weight, by name. Totals without weight (nothing to train on) are 0."""
        *values, weight = self.vector().tolist()
        names = [*self.shares, *self.totals]
        divisors = [1.0] * len(self.shares) + [weight or 1.0] * len(self.totals)
        return {name: value / divisor for name, value, divisor in zip(names, values, divisors)}


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps that have it; a user's loss may report one in some steps only."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: fmean(step[name] for step in steps if name in step) for name in names}
