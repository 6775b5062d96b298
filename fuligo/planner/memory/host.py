"""Memory of the host: what the optimizer, the reference and offloaded sides keep there, for the fullest node."""

from __future__ import annotations

from collections.abc import Sequence

from fuligo.planner.memory.activations import BF16
from fuligo.planner.memory.constants import amount
from fuligo.planner.memory.trainer import TrainerState, trainer_state
from fuligo.planner.plan import ClusterLayout, MemoryItem
from fuligo.planner.subject import Subject
from fuligo.planner.trainer_shape import trainer_shape


def host_items(subject: Subject, layout: ClusterLayout) -> tuple[MemoryItem, ...]:
    """What the Megatron trainer keeps in the memory of the node that needs most; empty where it keeps nothing there."""
    shape = trainer_shape(subject.config)
    if not shape.is_megatron:
        return ()
    states = [trainer_state(subject, shape, [stage for stage in layout.stages if stage.pipeline_rank == rank]) for rank in range(layout.pp)]
    nodes: dict[int, list[TrainerState]] = {}
    for placed in layout.gpus:
        if placed.trainer is not None:
            nodes.setdefault(placed.node, []).append(states[placed.trainer.pp])
    fullest = max((_items(subject, ranks) for ranks in nodes.values()), key=lambda items: sum(item.num_bytes for item in items))
    return tuple(item for item in fullest if item.num_bytes)


def _items(subject: Subject, ranks: Sequence[TrainerState]) -> list[MemoryItem]:
    """Of one node with these ranks."""
    config, count = subject.config, len(ranks)
    one_copy = sum(BF16 * (rank.trained.total + rank.frozen.total) for rank in ranks)
    adam = sum(rank.optimizer_on_host for rank in ranks)
    swapped = config.needs_reference or config.cluster.colocate
    moments = sum(rank.optimizer for rank in ranks) if config.cluster.colocate else 0
    return [
        MemoryItem("optimizer", adam, f"CPU Adam of {count} GPUs: fp32 weight, gradient and two moments, 16 bytes a parameter"),
        MemoryItem("reference", one_copy if config.needs_reference else 0, f"bf16 weights of the reference model, {count} GPUs"),
        MemoryItem("weights", one_copy if swapped else 0, "bf16 weights of the policy while the reference or the engines have the GPUs"),
        MemoryItem("offloaded_optimizer", moments, f"{amount(moments)} of optimizer state while the engines have the GPUs"),
    ]
