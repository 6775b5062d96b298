"""Packing of samples into the micro-batches of every rank, as positions in a list of lengths.

Pure. Packing decides speed and memory, never the loss: every denominator is counted before it (`algorithms.assign`).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from fuligo.errors import TrainerError
from fuligo.trainer.shared_prefixes import SharedPrefixes

Cost = Callable[[int], float]
"""FLOPs of a sequence by its length, or a value proportional to them. Can be pickled: the rank with the model sends it to the driver."""


@dataclass(slots=True, frozen=True)
class MicroBatchPlan:
    """Samples that go through the model together: shortest first, so that equal lengths are neighbors, or as neighbors in a trie."""

    samples: tuple[int, ...]
    """Positions in the list of lengths; never empty."""
    shared: tuple[int, ...] = ()
    """Tokens that each sample shares with the one before it, which the row holds once; empty: none."""
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
    """Limits of one micro-batch. A sample over `max_tokens` is a separate micro-batch; None means no limit."""

    max_tokens: int | None = None
    max_samples: int | None = None

    def admits(self, num_samples: int, num_tokens: int) -> bool:
        return (self.max_tokens is None or num_tokens <= self.max_tokens) and (self.max_samples is None or num_samples <= self.max_samples)


@dataclass(slots=True, frozen=True)
class _Unit:
    """Samples that stay together: one, or a tree of samples with common prefixes, in the order of the trie."""

    samples: tuple[int, ...]
    shared: tuple[int, ...]
    """Tokens that each sample shares with the one before it; 0 for the first."""
    num_tokens: int

    @classmethod
    def of(cls, samples: Sequence[int], shared: Sequence[int], lengths: Sequence[int]) -> Self:
        own = (0, *shared[1:])
        return cls(tuple(samples), own, sum(lengths[i] for i in samples) - sum(own))

    def cost(self, lengths: Sequence[int], cost: Cost) -> float:
        """Return the cost of the tokens that are computed: a shared prefix costs what a sequence of its length does, once."""
        return sum(cost(lengths[i]) for i in self.samples) - sum(cost(length) for length in self.shared if length)

    def halves(self, lengths: Sequence[int]) -> tuple["_Unit", "_Unit"]:
        middle = len(self.samples) // 2
        first, second = slice(None, middle), slice(middle, None)
        return tuple(_Unit.of(self.samples[half], self.shared[half], lengths) for half in (first, second))  # pyright: ignore[reportReturnType]


@dataclass(slots=True)
class _Bin:
    units: list[_Unit]
    num_samples: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, units: list[_Unit]) -> Self:
        return cls(units, sum(len(unit.samples) for unit in units), sum(unit.num_tokens for unit in units))

    def has_room(self, unit: _Unit, capacity: Capacity) -> bool:
        return capacity.admits(self.num_samples + len(unit.samples), self.num_tokens + unit.num_tokens)

    def add(self, unit: _Unit) -> None:
        self.units.append(unit)
        self.num_samples += len(unit.samples)
        self.num_tokens += unit.num_tokens

    def plan(self, lengths: Sequence[int]) -> MicroBatchPlan:
        if not any(any(unit.shared) for unit in self.units):
            samples = [i for unit in self.units for i in unit.samples]
            return MicroBatchPlan(tuple(sorted(samples, key=lambda i: (lengths[i], i))))
        units = sorted(self.units, key=lambda unit: (unit.num_tokens, unit.samples))
        return MicroBatchPlan(tuple(i for unit in units for i in unit.samples), tuple(n for unit in units for n in unit.shared))


def pack(
    lengths: Sequence[int],
    capacity: Capacity,
    *,
    num_ranks: int = 1,
    multiple_of: int = 1,
    balance_by: Cost | None = None,
    prefixes: SharedPrefixes | None = None,
) -> list[list[MicroBatchPlan]]:
    """Return [num_ranks][micro-batches] of an optimizer step: the same number on each rank, none empty, no sample left out or cut.

    Args:
        lengths: tokens of every sample of the step.
        multiple_of: divisor of each rank's number of micro-batches, which an interleaved pipeline needs.
        balance_by: balance this cost over the ranks; None: only the number of micro-batches and their tokens.
        prefixes: prefixes that the samples share. A micro-batch holds each once, and its capacity counts them once; samples that share
            stay together as far as it and the number of ranks allow. None: nothing is shared.

    With fewer samples than ranks, the other ranks get a repetition of weight 0, as they do where samples do not divide evenly.

    Raises:
        TrainerError: there is no sample.
    """
    if not lengths:
        raise TrainerError("cannot pack an optimizer step without samples")
    num_together = num_ranks * multiple_of
    units = _units(lengths, capacity, prefixes)
    while True:
        bins = _first_fit(units, capacity)
        num_bins = -(-len(bins) // num_together) * num_together
        num_filled = min(num_bins, len(lengths))
        if len(units) >= num_filled:
            break
        units = _halved(units, num_filled, lengths)  # whose prefixes are then in the row of either half
    _split_largest(bins, num_filled)
    # First-fit fills bins and leaves a small last one: that pass takes as long as its kernel launches, and the full ones the most memory.
    costs = {unit.samples: unit.num_tokens if balance_by is None else unit.cost(lengths, balance_by) for unit in units}
    bins = _even(units, capacity, len(bins), costs) or bins
    plans = [bin.plan(lengths) for bin in bins]
    shortest = min(range(len(lengths)), key=lambda i: (lengths[i], -i))
    plans += [MicroBatchPlan((shortest,), counts=False)] * (num_bins - len(bins))
    if balance_by is None:
        return [plans[rank::num_ranks] for rank in range(num_ranks)]
    repetitions = [balance_by(lengths[shortest])] * (num_bins - len(bins))
    return _deal_evenly(plans, [*(sum(costs[unit.samples] for unit in bin.units) for bin in bins), *repetitions], num_ranks)


def sequence_flops(linear: float, attention: float) -> Cost:
    """Return the cost of a sequence: `linear` FLOPs for each token, `attention` FLOPs for each pair of tokens that attend."""
    return partial(_sequence_flops, linear, attention)


def _sequence_flops(linear: float, attention: float, length: int) -> float:
    return linear * length + attention * length * (length + 1) / 2


def _units(lengths: Sequence[int], capacity: Capacity, prefixes: SharedPrefixes | None) -> list[_Unit]:
    """Return every sample by itself, or trees of samples that fit into a micro-batch; the longest first."""
    if prefixes is None:
        units = [_Unit((i,), (0,), length) for i, length in enumerate(lengths)]
    else:
        trees = _trees(lengths, capacity, prefixes)
        units = [_Unit.of([i for i, _ in tree], [shared for _, shared in tree], lengths) for tree in trees]
    return sorted(units, key=lambda unit: (-unit.num_tokens, unit.samples))


def _trees(lengths: Sequence[int], capacity: Capacity, prefixes: SharedPrefixes) -> list[list[tuple[int, int]]]:
    """Cut the trie where nothing is shared, or where a micro-batch is full. Return (sample, tokens shared) of each part."""
    trees: list[list[tuple[int, int]]] = []
    num_tokens = 0
    for i, shared in zip(prefixes.order, prefixes.shared, strict=True):
        if trees and shared and capacity.admits(len(trees[-1]) + 1, num_tokens + lengths[i] - shared):
            trees[-1].append((i, shared))
            num_tokens += lengths[i] - shared
        else:
            trees.append([(i, 0)])
            num_tokens = lengths[i]
    return trees


def _halved(units: list[_Unit], num_units: int, lengths: Sequence[int]) -> list[_Unit]:
    """Halve the tree with most tokens among those of several samples until there are `num_units`; longest first."""
    units = list(units)
    while len(units) < num_units:
        largest = max((unit for unit in units if len(unit.samples) > 1), key=lambda unit: unit.num_tokens)
        units.remove(largest)
        units += largest.halves(lengths)
    return sorted(units, key=lambda unit: (-unit.num_tokens, unit.samples))


def _first_fit(longest_first: Sequence[_Unit], capacity: Capacity) -> list[_Bin]:
    """Pack first-fit decreasing: never more than 11/9 of the fewest bins possible plus one (Johnson 1973)."""
    bins: list[_Bin] = []
    for unit in longest_first:
        bin = next((bin for bin in bins if bin.has_room(unit, capacity)), None)
        if bin is None:
            bins.append(bin := _Bin([]))
        bin.add(unit)
    return bins


def _split_largest(bins: list[_Bin], num_bins: int) -> None:
    """Halve, in place, the bin with most tokens among those that can be halved until there are `num_bins`."""
    while len(bins) < num_bins:
        largest = max((bin for bin in bins if len(bin.units) > 1), key=lambda bin: bin.num_tokens)
        bins.remove(largest)
        bins += [_Bin.of(largest.units[::2]), _Bin.of(largest.units[1::2])]


def _even(longest_first: Sequence[_Unit], capacity: Capacity, num_bins: int, costs: Mapping[tuple[int, ...], float]) -> list[_Bin] | None:
    """Put the units into `num_bins` bins of about equal cost, the longest unit first into the cheapest bin with room.

    Return None if a unit is left over: first-fit packs tighter.
    """
    bins = [_Bin([]) for _ in range(num_bins)]
    cheapest = [(0.0, b) for b in range(num_bins)]
    for unit in longest_first:
        full: list[tuple[float, int]] = []
        while cheapest and bins[cheapest[0][1]].units and not bins[cheapest[0][1]].has_room(unit, capacity):
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        total, b = heapq.heappop(cheapest)
        bins[b].add(unit)
        for entry in [*full, (total + costs[unit.samples], b)]:
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
