"""Placement of trainer ranks and engines on the GPUs of a cluster, for both plan and run."""

from collections.abc import Iterator, Sequence

from fuligo.config.topology import EngineGroupSpec

Slot = tuple[int, int]
"""(node, GPU index within the node)."""


def trainer_slots(num_ranks: int, per_node: int) -> list[Slot]:
    """Return the trainer's GPUs by rank, `per_node` on each node."""
    return [divmod(rank, per_node) for rank in range(num_ranks)]


def engine_slots(trainers: Sequence[Slot], num_gpus: int, per_node: int, *, shares: bool) -> list[Slot]:
    """Return the engines' GPUs in order: first the trainer's GPUs if `shares`, then GPUs without a trainer rank, node by node."""
    chosen = list(trainers[:num_gpus]) if shares else []
    taken = set(trainers)
    number = 0
    while len(chosen) < num_gpus:
        slot = divmod(number, per_node)
        if slot not in taken:
            chosen.append(slot)
        number += 1
    return chosen


def engine_gpus(groups: Sequence[EngineGroupSpec]) -> Iterator[range]:
    """Yield each engine's range of indices in the list that `engine_slots` returns; the ranges of placeholder groups are skipped."""
    first = 0
    for group in groups:
        for number in range(group.num_engines):
            start = first + number * group.num_gpus_per_engine
            yield range(start, start + group.num_gpus_per_engine)
        first += group.num_gpus
