"""Packing of samples into the micro-batches of every rank, as positions in a list of lengths.

Pure. Packing decides speed and memory, never the loss: every denominator is counted before it (`algorithms.assign`).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fuligo.errors import TrainerError

Cost = Callable[[int], float]
"""FLOPs of a sequence by its length, or a value proportional to them. Can be pickled: the rank with the model sends it to the driver."""


@dataclass(slots=True, frozen=True)
class MicroBatchPlan:
    """Samples that go through the model together, shortest first, so that equal lengths are neighbours."""

    samples: tuple[int, ...]
    """Positions in the list of lengths; never empty."""
    counts: bool = True
    """False: a repetition that keeps this rank in step with the others; its tokens have weight 0."""


@dataclass(slots=True, frozen=True)
class MicroBatchSchedule:
    """Micro-batches that a data-parallel replica computes, in order."""

    plans: list[MicroBatchPlan]
    num_tokens: int | None = None
    """Tokens of each row on all replicas, with padding; None: each row keeps its length."""


@dataclass(slots=True, frozen=True)
class Capacity:
    """Limits of one micro-batch. A sample over `max_tokens` is a micro-batch of its own; None means no limit."""

    max_tokens: int | None = None
    max_samples: int | None = None

    def admits(self, num_samples: int, num_tokens: int) -> bool:
        return (self.max_tokens is None or num_tokens <= self.max_tokens) and (self.max_samples is None or num_samples <= self.max_samples)


@dataclass(slots=True)
class _Bin:
    samples: list[int]
    num_tokens: int

    def has_room(self, length: int, capacity: Capacity) -> bool:
        return capacity.admits(len(self.samples) + 1, self.num_tokens + length)


def pack(
    lengths: Sequence[int], capacity: Capacity, *, num_ranks: int = 1, multiple_of: int = 1, balance_by: Cost | None = None
) -> list[list[MicroBatchPlan]]:
    """Return [num_ranks][micro-batches] of an optimizer step: the same number on each rank, none empty, no sample left out or cut.

    Args:
        lengths: tokens of every sample of the step.
        multiple_of: divisor of each rank's number of micro-batches, which an interleaved pipeline needs.
        balance_by: balance this cost over the ranks; None: only the number of micro-batches and their tokens.

    With fewer samples than ranks, the others get a repetition that weighs nothing, as where samples do not divide evenly.

    Raises:
        TrainerError: there is no sample.
    """
    if not lengths:
        raise TrainerError("cannot pack an optimizer step without samples")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _first_fit(longest_first, lengths, capacity)
    num_together = num_ranks * multiple_of
    num_bins = -(-len(bins) // num_together) * num_together
    _split_largest(bins, min(num_bins, len(lengths)), lengths)
    # First-fit fills bins and leaves a small last one: that pass takes as long as its kernel launches, and the full ones the most memory.
    bins = _even(longest_first, lengths, capacity, len(bins), balance_by or float) or bins
    plans = [MicroBatchPlan(tuple(sorted(bin.samples, key=lambda i: (lengths[i], i)))) for bin in bins]
    plans += [MicroBatchPlan((longest_first[-1],), counts=False)] * (num_bins - len(bins))
    if balance_by is None:
        return [plans[rank::num_ranks] for rank in range(num_ranks)]
    return _deal_evenly(plans, [sum(balance_by(lengths[i]) for i in plan.samples) for plan in plans], num_ranks)


def sequence_flops(linear: float, attention: float) -> Cost:
    """Return the cost of a sequence: `linear` FLOPs for each token, `attention` FLOPs for each pair of tokens that attend."""
    return partial(_sequence_flops, linear, attention)


def _sequence_flops(linear: float, attention: float, length: int) -> float:
    return linear * length + attention * length * (length + 1) / 2


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], capacity: Capacity) -> list[_Bin]:
    """Pack first-fit decreasing: never more than 11/9 of the fewest bins possible plus one (Johnson 1973)."""
    bins: list[_Bin] = []
    for i in longest_first:
        bin = next((bin for bin in bins if bin.has_room(lengths[i], capacity)), None)
        if bin is None:
            bins.append(_Bin([i], lengths[i]))
        else:
            bin.samples.append(i)
            bin.num_tokens += lengths[i]
    return bins


def _split_largest(bins: list[_Bin], num_bins: int, lengths: Sequence[int]) -> None:
    """Halve, in place, the bin with most tokens among those that can be halved until there are `num_bins`."""
    while len(bins) < num_bins:
        largest = max((bin for bin in bins if len(bin.samples) > 1), key=lambda bin: bin.num_tokens)
        bins.remove(largest)
        for half in (largest.samples[::2], largest.samples[1::2]):
            bins.append(_Bin(half, sum(lengths[i] for i in half)))


def _even(longest_first: Sequence[int], lengths: Sequence[int], capacity: Capacity, num_bins: int, cost: Cost) -> list[_Bin] | None:
    """Put the samples into `num_bins` bins of about equal cost, the costliest sample first into the cheapest bin with room.

    Return None if a sample is left over: first-fit packs tighter.
    """
    bins = [_Bin([], 0) for _ in range(num_bins)]
    cheapest = [(0.0, b) for b in range(num_bins)]
    for i in longest_first:
        full: list[tuple[float, int]] = []
        while cheapest and bins[cheapest[0][1]].samples and not bins[cheapest[0][1]].has_room(lengths[i], capacity):
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        total, b = heapq.heappop(cheapest)
        bins[b].samples.append(i)
        bins[b].num_tokens += lengths[i]
        for entry in [*full, (total + cost(lengths[i]), b)]:
            heapq.heappush(cheapest, entry)
    return bins


def _deal_evenly(plans: list[MicroBatchPlan], costs: list[float], num_ranks: int) -> list[list[MicroBatchPlan]]:
    """Deal micro-batches of similar cost to all ranks at a time, the costliest to the rank with the lowest total so far."""
    costliest_first = sorted(range(len(plans)), key=lambda p: -costs[p])
    ranks: list[list[MicroBatchPlan]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(plans), num_ranks):
        idle_first = sorted(range(num_ranks), key=lambda rank: totals[rank])
        for rank, p in zip(idle_first, costliest_first[start : start + num_ranks]):
            ranks[rank].append(plans[p])
            totals[rank] += costs[p]
    return ranks
