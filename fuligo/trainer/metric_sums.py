"""Metrics of an optimizer step as sums and maxima, so that they do not depend on the split into micro-batches and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

from fuligo.errors import TrainerError


def is_maximum(name: str) -> bool:
    """Return whether a metric of a user's loss is a maximum over micro-batches, ranks and steps, by its name."""
    return name.endswith("_max")


@dataclass(slots=True)
class MetricSums:
    """Detached scalars that add up over a step's micro-batches and ranks. `means` divides once, at the end."""

    shares: dict[str, Tensor]
    """The micro-batch's shares of values of the whole step (loss terms), which add up to them."""
    totals: dict[str, Tensor]
    """sum_t weight_t * x_t of a quantity whose mean over the step is wanted."""
    weight: Tensor
    """sum_t weight_t: the denominator of `totals`."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Values whose maximum over the step is wanted."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        shares: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
        weights: Tensor,
        maxima: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Self:
        """Detach everything and weigh `totals`, each [N], token by token with `weights` [N]."""
        return cls(
            shares={name: share.detach() for name, share in shares.items()},
            totals={name: (weights * values.detach()).sum() for name, values in totals.items()},
            weight=weights.sum(),
            maxima={name: value.detach() for name, value in maxima.items()},
        )

    def __add__(self, other: Self) -> Self:
        """Add the sums of another micro-batch or rank. Raises TrainerError if the names differ, which only a user's loss can cause."""
        if [*self.shares, *self.totals, *self.maxima] != [*other.shares, *other.totals, *other.maxima]:
            raise TrainerError(
                f"--custom-loss-function-path returned the metrics {', '.join([*self.shares, *self.maxima])} for one micro-batch and "
                f"{', '.join([*other.shares, *other.maxima])} for another; return the same for each, 0 where there is nothing to count"
            )
        return self.with_vectors(self.vector() + other.vector(), self.peaks().maximum(other.peaks()))

    def cpu(self) -> Self:
        return self.with_vectors(self.vector().cpu(), self.peaks().cpu())

    def vector(self) -> Tensor:
        """Return [K] float64, for instance to all-reduce. The order is fixed: the same settings give the same on every rank."""
        return torch.stack([*self.shares.values(), *self.totals.values(), self.weight]).double()

    def peaks(self) -> Tensor:
        """Return [M] float64 maxima, in a fixed order."""
        return torch.stack([*self.maxima.values()]).double() if self.maxima else self.weight.new_empty(0, dtype=torch.float64)

    def with_vectors(self, vector: Tensor, peaks: Tensor) -> Self:
        """Replace the values by those of `vector` [K] and `peaks` [M]."""
        values = iter(vector)
        shares = {name: next(values) for name in self.shares}
        totals = {name: next(values) for name in self.totals}
        return replace(self, shares=shares, totals=totals, weight=next(values), maxima=dict(zip(self.maxima, peaks, strict=True)))

    def means(self) -> dict[str, float]:
        """Return shares, totals / weight, and maxima, by name. Totals without weight (nothing to train on) are 0."""
        *values, weight = self.vector().tolist()
        names = [*self.shares, *self.totals]
        divisors = [1.0] * len(self.shares) + [weight or 1.0] * len(self.totals)
        means = {name: value / divisor for name, value, divisor in zip(names, values, divisors)}
        return means | dict(zip(self.maxima, self.peaks().tolist(), strict=True))


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps that have it, except maxima; a user's loss may report a metric in some steps only."""
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: max(values) if is_maximum(name) else fmean(values) for name, values in found.items()}
