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
    """Return whether a custom loss's metric is combined by maximum instead of sum: its name ends in `_max`."""
    return name.endswith("_max")


@dataclass(slots=True)
class MetricSums:
    """Detached scalars that are added over a step's micro-batches and ranks; `means` divides them once, at the end."""

    shares: dict[str, Tensor]
    """Loss terms of the micro-batch; added over the step, they are the terms of the step's loss."""
    totals: dict[str, Tensor]
    """sum_t weight_t * x_t of each quantity x whose mean over the step is reported."""
    weight: Tensor
    """sum_t weight_t: the denominator of `totals`."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Values whose maximum over the step is reported."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        shares: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
        weights: Tensor,
        maxima: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Self:
        """Return the sums of a micro-batch: all values detached, and `totals`, [N] each, summed over the tokens with `weights` [N]."""
        return cls(
            shares={name: share.detach() for name, share in shares.items()},
            totals={name: (weights * values.detach()).sum() for name, values in totals.items()},
            weight=weights.sum(),
            maxima={name: value.detach() for name, value in maxima.items()},
        )

    def __add__(self, other: Self) -> Self:
        """Combine with another micro-batch or rank: add the sums, and take the larger of each maximum.

        Raises TrainerError if the names differ, which only a user's loss can cause.
        """
        if [*self.shares, *self.totals, *self.maxima] != [*other.shares, *other.totals, *other.maxima]:
            raise TrainerError(
                f"--custom-loss-function-path returned the metrics {', '.join([*self.shares, *self.maxima])} for one micro-batch and "
                f"{', '.join([*other.shares, *other.maxima])} for another; return the same metrics for each, with 0 where there is nothing "
                "to count"
            )
        return self.with_vectors(self.vector() + other.vector(), self.peaks().maximum(other.peaks()))

    def cpu(self) -> Self:
        return self.with_vectors(self.vector().cpu(), self.peaks().cpu())

    def vector(self) -> Tensor:
        """Return shares, totals and weight as [K] float64, in an order that is the same on all ranks, for an all-reduce."""
        return torch.stack([*self.shares.values(), *self.totals.values(), self.weight]).double()

    def peaks(self) -> Tensor:
        """Return the maxima as [M] float64, in an order that is the same on all ranks."""
        return torch.stack([*self.maxima.values()]).double() if self.maxima else self.weight.new_empty(0, dtype=torch.float64)

    def with_vectors(self, vector: Tensor, peaks: Tensor) -> Self:
        """Return a copy with values from `vector` [K] and `peaks` [M]."""
        values = iter(vector)
        shares = {name: next(values) for name in self.shares}
        totals = {name: next(values) for name in self.totals}
        return replace(self, shares=shares, totals=totals, weight=next(values), maxima=dict(zip(self.maxima, peaks, strict=True)))

    def means(self) -> dict[str, float]:
        """Return shares, totals / weight, and maxima by name. If the weight is 0 (no trained tokens), the means of `totals` are 0."""
        *values, weight = self.vector().tolist()
        names = [*self.shares, *self.totals]
        divisors = [1.0] * len(self.shares) + [weight or 1.0] * len(self.totals)
        means = {name: value / divisor for name, value, divisor in zip(names, values, divisors)}
        return means | dict(zip(self.maxima, self.peaks().tolist(), strict=True))


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric (take the maximum of `_max` metrics) over the optimizer steps that report it.

    A custom loss may report a metric in only some of the steps.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: max(values) if is_maximum(name) else fmean(values) for name, values in found.items()}
