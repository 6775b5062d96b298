"""Packing of samples into the micro-batches of every data-parallel replica. A sample is given by its length and referred to by index.

Packing affects speed and memory, never the loss, because all denominators are computed before it (`algorithms.assign`).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from fuligo.errors import TrainerError
from fuligo.trainer.shared_prefixes import SharedPrefixes

Cost = Callable[[int], float]
"""Length of a sequence -> its FLOPs, or a proportional value. Picklable, because the rank with the model sends it to the driver."""


@dataclass(slots=True, frozen=True)
class MicroBatchPlan:
    """Samples of one micro-batch, shortest first so that equal lengths are adjacent, or in trie order if they share prefixes."""

    samples: tuple[int, ...]
    """Indices into the list of lengths; never empty."""
    shared: tuple[int, ...] = ()
    """Number of leading tokens that each sample shares with the previous one, stored once; empty if nothing is shared."""
    counts: bool = True
    """False: this is a repetition that keeps the rank in step with the others; its tokens have weight 0."""


@dataclass(slots=True, frozen=True)
class MicroBatchSchedule:
    """Micro-batches of one data-parallel replica, in order."""

    plans: list[MicroBatchPlan]
    num_tokens: int | None = None
    """Length to which every row is padded on all replicas, in tokens; None: rows keep their lengths."""


@dataclass(slots=True, frozen=True)
class Capacity:
    """Limits of one micro-batch; None means no limit. A sample longer than `max_tokens` is packed alone."""

    max_tokens: int | None = None
    max_samples: int | None = None

    def admits(self, num_samples: int, num_tokens: int) -> bool:
        return (self.max_tokens is None or num_tokens <= self.max_tokens) and (self.max_samples is None or num_samples <= self.max_samples)


@dataclass(slots=True, frozen=True)
class _Unit:
    """Samples that are packed together: one sample, or a tree of samples with common prefixes, in trie order."""

    samples: tuple[int, ...]
    shared: tuple[int, ...]
    """Number of tokens that each sample shares with the previous one; 0 for the first."""
    num_tokens: int

    @classmethod
    def of(cls, samples: Sequence[int], shared: Sequence[int], lengths: Sequence[int]) -> Self:
        own = (0, *shared[1:])
        return cls(tuple(samples), own, sum(lengths[i] for i in samples) - sum(own))

    def cost(self, lengths: Sequence[int], cost: Cost) -> float:
        """Return the cost of the unit, with each shared prefix counted once."""
        return sum(cost(lengths[i]) for i in self.samples) - sum(cost(length) for length in self.shared if length)

    def halves(self, lengths: Sequence[int]) -> tuple["_Unit", "_Unit"]:
        middle = len(self.samples) // 2
        first, second = slice(None, middle), slice(middle, None)
        return tuple(_Unit.of(self.samples[half], self.shared[half], lengths) for half in (first, second))  # pyrefly: ignore[bad-return]


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
    """Pack the samples of an optimizer step and return [num_ranks][micro-batches].

    All ranks get the same number of micro-batches; none is empty, and no sample is left out or cut. If there are fewer samples than
    micro-batches, the remaining micro-batches repeat the shortest sample with weight 0.

    Args:
        lengths: number of tokens of every sample of the step.
        num_ranks: number of data-parallel replicas, called ranks here.
        multiple_of: number that divides each rank's number of micro-batches, as an interleaved pipeline requires.
        balance_by: cost to balance over the ranks; None: balance only the number of micro-batches and their tokens.
        prefixes: prefixes that the samples share; None: nothing is shared. A micro-batch stores each prefix once and counts it once
            against the capacity. Samples with a common prefix stay together as far as capacity and number of ranks allow.

    Raises:
        TrainerError: `lengths` is empty.
    """
    if not lengths:
        raise TrainerError("cannot pack an optimizer step without samples; pass at least one")
    num_together = num_ranks * multiple_of
    units = _units(lengths, capacity, prefixes)
    while True:
        bins = _first_fit(units, capacity)
        num_bins = -(-len(bins) // num_together) * num_together
        num_filled = min(num_bins, len(lengths))
        if len(units) >= num_filled:
            break
        units = _halved(units, num_filled, lengths)  # both halves of a tree then compute the prefix that they share
    _split_largest(bins, num_filled)
    # First-fit leaves full bins, which need the most memory, and a small last one, whose pass is bound by kernel launches.
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
    """Return the cost function of a sequence: `linear` FLOPs for each token, `attention` FLOPs for each pair of tokens that attend."""
    return partial(_sequence_flops, linear, attention)


def _sequence_flops(linear: float, attention: float, length: int) -> float:
    return linear * length + attention * length * (length + 1) / 2


def _units(lengths: Sequence[int], capacity: Capacity, prefixes: SharedPrefixes | None) -> list[_Unit]:
    """Return one unit per sample, or per tree of samples that fits into a micro-batch; longest first."""
    if prefixes is None:
        units = [_Unit((i,), (0,), length) for i, length in enumerate(lengths)]
    else:
        trees = _trees(lengths, capacity, prefixes)
        units = [_Unit.of([i for i, _ in tree], [shared for _, shared in tree], lengths) for tree in trees]
    return sorted(units, key=lambda unit: (-unit.num_tokens, unit.samples))


def _trees(lengths: Sequence[int], capacity: Capacity, prefixes: SharedPrefixes) -> list[list[tuple[int, int]]]:
    """Cut the trie where nothing is shared or a micro-batch is full. Return the (sample, number of shared tokens) pairs of each tree."""
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
    """Halve the largest unit of several samples until there are `num_units`. Return them longest first."""
    units = list(units)
    while len(units) < num_units:
        largest = max((unit for unit in units if len(unit.samples) > 1), key=lambda unit: unit.num_tokens)
        units.remove(largest)
        units += largest.halves(lengths)
    return sorted(units, key=lambda unit: (-unit.num_tokens, unit.samples))


def _first_fit(longest_first: Sequence[_Unit], capacity: Capacity) -> list[_Bin]:
    """Pack by first-fit decreasing: with a token limit alone, at most 11/9 of the fewest possible bins, plus one (Yue 1991)."""
    bins: list[_Bin] = []
    for unit in longest_first:
        bin = next((bin for bin in bins if bin.has_room(unit, capacity)), None)
        if bin is None:
            bins.append(bin := _Bin([]))
        bin.add(unit)
    return bins


def _split_largest(bins: list[_Bin], num_bins: int) -> None:
    """Halve the largest bin of several units, in place, until there are `num_bins`."""
    while len(bins) < num_bins:
        largest = max((bin for bin in bins if len(bin.units) > 1), key=lambda bin: bin.num_tokens)
        bins.remove(largest)
        bins += [_Bin.of(largest.units[::2]), _Bin.of(largest.units[1::2])]


def _even(longest_first: Sequence[_Unit], capacity: Capacity, num_bins: int, costs: Mapping[tuple[int, ...], float]) -> list[_Bin] | None:
    """Distribute the units, longest first, over `num_bins` bins of about equal cost: each goes into the cheapest bin with room.

    Return None if a unit fits into no bin; first-fit packs tighter.
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
    """Deal one micro-batch to every rank per round, costliest first; in each round the costliest goes to the rank with the lowest total."""
    costliest_first = sorted(range(len(plans)), key=lambda p: -costs[p])
    ranks: list[list[MicroBatchPlan]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(plans), num_ranks):
        idle_first = sorted(range(num_ranks), key=lambda rank: totals[rank])
        for rank, p in zip(idle_first, costliest_first[start : start + num_ranks]):
            ranks[rank].append(plans[p])
            totals[rank] += costs[p]
    return ranks
