"""Which GPU of which node: the order in which trainer and engines fill a cluster, for the plan and for the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuligo.config.topology import EngineGroupSpec

Slot = tuple[int, int]
"""(node, index within the node)"""


def trainer_slots(num_ranks: int, per_node: int) -> list[Slot]:
    """GPUs of the trainer, by rank: `per_node` of each node."""
    return [divmod(rank, per_node) for rank in range(num_ranks)]


def engine_slots(trainers: Sequence[Slot], num_gpus: int, per_node: int, *, shares: bool) -> list[Slot]:
    """GPUs of the engines, in order: where they share, the trainer's first; then those still free, node by node."""
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
    """Which of the GPUs of all engines each engine takes; a placeholder leaves its GPUs free."""
    first = 0
    for group in groups:
        for number in range(group.num_engines):
            start = first + number * group.num_gpus_per_engine
            yield range(start, start + group.num_gpus_per_engine)
        first += group.num_gpus
