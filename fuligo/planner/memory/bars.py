"""Memory bars: one per kind of GPU, and one for the host."""

from fuligo.config.topology import EngineGroupSpec, engine_groups, policy_model
from fuligo.layout.megatron import layout_of
from fuligo.planner.lengths import longest_sample
from fuligo.planner.memory.engine import (
    EngineMemory,
    embedded_items,
    embedded_kv_tokens,
    engine_items,
    engine_memory,
    engine_resident_items,
)
from fuligo.planner.memory.host import engine_on_host, host_items, moved_bytes
from fuligo.planner.memory.parameters import TRAINER_LEFT_BYTES
from fuligo.planner.memory.torch_trainer import torch_trainer_items
from fuligo.planner.memory.trainer import trainer_items, trainer_resident_bytes
from fuligo.planner.plan import ClusterLayout, EngineCapacity, MemoryBar, MemoryItem
from fuligo.planner.subject import Subject

Planned = tuple[int, EngineGroupSpec, EngineMemory]
"""Index of an engine group, the group, and its memory per GPU."""


def memory_bars(subject: Subject, layout: ClusterLayout, host_memory_bytes: int | None = None) -> tuple[MemoryBar, ...]:
    """Return the peak memory of each kind of GPU, trainer before engines, and of the host.

    `host_memory_bytes`: memory of a node; None: that of the vendor's own servers with this GPU.
    """
    planned = planned_engines(subject)
    capacity = subject.gpu.host_memory_bytes * layout.num_gpus_per_node if host_memory_bytes is None else host_memory_bytes
    num_gpus = max(sum(1 for gpu in layout.gpus if gpu.node == node and gpu.trainer) for node in range(layout.num_nodes))
    on_host = {group: engine_on_host(subject.config, spec, memory) for group, spec, memory in planned}
    host = MemoryBar("host", num_gpus, capacity, host_items(subject, layout, on_host))
    return (*_trainer_bars(subject, layout, planned), *_engine_bars(subject, planned), host)


def trainer_bars(subject: Subject, layout: ClusterLayout) -> list[MemoryBar]:
    """Return the bars of the trainer's GPUs among `memory_bars`; none if the run has no trainer."""
    return _trainer_bars(subject, layout, planned_engines(subject))


def engine_bars(subject: Subject) -> list[MemoryBar]:
    """Return the bars of SGLang servers' GPUs among `memory_bars`."""
    return _engine_bars(subject, planned_engines(subject))


def engine_capacities(subject: Subject, layout: ClusterLayout) -> tuple[EngineCapacity, ...]:
    longest = longest_sample(subject.config)
    if layout.engine_groups and subject.config.engine_capabilities.beside_trainer:
        tokens = embedded_kv_tokens(subject)
        return (EngineCapacity(0, tokens, tokens // longest),)
    capacities = []
    for group, spec, memory in planned_engines(subject):
        sequences = memory.kv_tokens // longest
        if memory.settings.max_running_requests is not None:
            sequences = min(sequences, max(1, memory.settings.max_running_requests // spec.dp_size))
        capacities.append(EngineCapacity(group, memory.kv_tokens * spec.dp_size, sequences * spec.dp_size))
    return tuple(capacities)


def planned_engines(subject: Subject) -> list[Planned]:
    """Return (index of the group, group, memory per GPU) of each group of SGLang servers whose model is known."""
    config = subject.config
    resident = _trainer_bytes(subject) if _trains_there(subject) else 0
    return [
        (group, spec, engine_memory(spec, architecture, subject.gpu, resident, config))
        for group, spec in enumerate(engine_groups(config))
        if spec.num_engines and (architecture := subject.served_by(spec)) is not None
    ]


def _engine_bars(subject: Subject, planned: list[Planned]) -> list[MemoryBar]:
    # In the first step, PyTorch's allocator and CUDA's libraries take more memory, and keep it.
    left_over = _trainer_bytes(subject) + (TRAINER_LEFT_BYTES if subject.is_megatron else 0) if _trains_there(subject) else 0
    return [
        MemoryBar(
            owner=f"engines: {spec.worker_type}" if spec.model == "default" else f"engines: {spec.model} {spec.worker_type}",
            num_gpus=spec.num_gpus,
            capacity_bytes=subject.gpu.memory_bytes,
            items=engine_items(spec, memory, left_over, stays=subject.config.trainer_stays),
            engine_group=group,
        )
        for group, spec, memory in planned
    ]


def _trainer_bars(subject: Subject, layout: ClusterLayout, planned: list[Planned]) -> list[MemoryBar]:
    if subject.config.debug.debug_rollout_only:
        return []
    capacity = subject.gpu.memory_bytes
    shape = layout_of(subject.config)
    if not subject.is_megatron:
        items = torch_trainer_items(subject)
        if not (layout.engine_groups and subject.config.engine_capabilities.beside_trainer):
            return [MemoryBar("trainer", shape.num_ranks, capacity, (*items, *_engines_left_over(subject, planned)), pipeline_rank=0)]
        shared = MemoryBar("trainer and engine", 1, capacity, (*items, *embedded_items(subject)), pipeline_rank=0, engine_group=0)
        alone = MemoryBar("trainer", shape.num_ranks - 1, capacity, items, pipeline_rank=0)
        return [shared, alone] if shape.num_ranks > 1 else [shared]
    left_over = _engines_left_over(subject, planned)
    return [
        MemoryBar(
            owner="trainer" if shape.pp == 1 else f"trainer stage {rank}",
            num_gpus=shape.num_ranks // shape.pp,
            capacity_bytes=capacity,
            items=(*trainer_items(subject, layout, rank), *left_over),
            pipeline_rank=rank,
        )
        for rank in range(shape.pp)
    ]


def _engines_left_over(subject: Subject, planned: list[Planned]) -> tuple[MemoryItem, ...]:
    """Return what engines keep on a GPU while the trainer works (--colocate), for the engine that keeps most."""
    if not subject.config.cluster.colocate:
        return ()
    kept: list[tuple[MemoryItem, ...]] = []
    for _, spec, memory in planned:
        items = engine_resident_items(spec, memory)
        # A server keeps its weights if a sync sends only what changed.
        if subject.config.weight_sync.update_weight_mode == "delta" and spec.model == policy_model(subject.config):
            note = "weights that the released engine keeps: --update-weight-mode delta"
            items = (*items, MemoryItem("engine_weights", memory.weights + memory.draft_weights, note))
        kept.append(items)
    return max(kept, key=lambda items: sum(item.num_bytes for item in items), default=())


def _trainer_bytes(subject: Subject) -> int:
    """Return the bytes that a colocated trainer has on a GPU before its first step, when engines start."""
    kept = moved_bytes(subject) if subject.config.trainer_stays else 0
    return trainer_resident_bytes(subject) + kept


def _trains_there(subject: Subject) -> bool:
    """Return whether a trainer keeps memory on the engines' GPUs (--colocate)."""
    return bool(subject.config.cluster.colocate) and not subject.config.debug.debug_rollout_only
