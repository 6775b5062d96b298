"""The answer of the planner: what `fuligo plan` prints, writes as JSON and draws."""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.config.findings import Finding


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers that one pipeline rank computes."""

    pipeline_rank: int
    virtual_rank: int
    """0 without virtual pipeline stages."""
    first_layer: int
    """Counted from 0."""
    num_layers: int
    index_layers: tuple[int, ...]
    """Of them, those that compute their own sparse index (DSA), counted from 0."""
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """Where one process of the trainer stands in each parallel dimension (Megatron's order tp-cp-ep-dp-pp, tp innermost)."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    expert_dp: int


@dataclass(frozen=True, slots=True)
class EngineRank:
    """Where one process of an engine stands."""

    group: int
    """Index into `ClusterLayout.engine_groups`."""
    engine: int
    """Number of the engine among all engines of the run."""
    rank: int
    """Within the engine."""
    tp: int
    pp: int
    dp: int
    """Of attention; 0 without DP attention."""
    ep: int


@dataclass(frozen=True, slots=True)
class PlacedGpu:
    """One GPU of the cluster and what runs there."""

    node: int
    local_index: int
    """Within the node."""
    trainer: TrainerRank | None
    engine: EngineRank | None
    """Both under `--colocate`; neither where a placeholder group keeps the GPU free."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that are alike."""

    model: str
    worker_type: str
    """regular, prefill, decode or placeholder."""
    num_engines: int
    num_gpus_per_engine: int
    tp: int
    pp: int
    dp: int
    ep: int


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """What runs where."""

    num_nodes: int
    num_gpus_per_node: int
    gpus: tuple[PlacedGpu, ...]
    stages: tuple[Stage, ...]
    engine_groups: tuple[EngineGroup, ...]
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    dp: int
    """Sizes of the trainer's dimensions; 1 each for the torch backend but dp."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One layer of a memory bar."""

    name: str
    """weights, gradients, optimizer, activations, logits, communication, kv_cache, graphs, runtime, ..."""
    num_bytes: int
    note: str
    """How it comes about, with the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """The peak memory of one kind of GPU."""

    owner: str
    """`trainer stage 0`, `engines: decode`, `host`."""
    num_gpus: int
    """GPUs that look so."""
    capacity_bytes: int
    items: tuple[MemoryItem, ...]
    pipeline_rank: int | None = None
    """Of the trainer's GPUs that look so; None for engines and the host."""
    engine_group: int | None = None
    """Index into `ClusterLayout.engine_groups` for the GPUs of engines; None for the trainer and the host. Both are set where one bar
    stands for trainer and engine together."""

    @property
    def used_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What one engine of a group can hold."""

    group: int
    kv_cache_tokens: int
    concurrent_sequences: int
    """Of the longest prompt and response that the config allows; no more than the engine runs at a time."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of one step on the timeline."""

    name: str
    """rollout, reward, score, train, optimizer, sync, offload ..."""
    lane: str
    """trainer, engines, or teacher where engines serve one."""
    start_s: float
    duration_s: float
    flops: float
    """Over all GPUs; 0 where it moves bytes only."""
    note: str
    """The assumption behind the duration (MFU, bandwidth) with its number."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of flags that makes the run fit, and what it costs."""

    flags: tuple[str, ...]
    """As typed: `--recompute-granularity full`."""
    saved_bytes: int
    cost: str
    """In words, with a number where there is one: `+33% of the trainer's FLOPs`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is known of a run before it starts."""

    name: str
    model_type: str
    num_parameters: int
    num_active_parameters: int
    num_mtp_parameters: int
    gpu: str
    findings: tuple[Finding, ...]
    layout: ClusterLayout | None
    """None where the errors leave no layout."""
    memory: tuple[MemoryBar, ...]
    capacities: tuple[EngineCapacity, ...]
    phases: tuple[Phase, ...]
    """Of one step, in order; empty where there is no layout."""
    step_s: float
    suggestions: tuple[Suggestion, ...]
    """At most three, the cheapest first; empty where everything fits."""
    assumptions: tuple[str, ...]
    """Of the estimates, one sentence each."""
