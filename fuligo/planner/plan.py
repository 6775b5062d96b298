"""Data of a plan, which `fuligo plan` prints and draws, and its form as JSON (schema: `plan.schema.json` next to this file)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from fuligo.config import Config
from fuligo.config.changes import change_text
from fuligo.config.findings import Change, Finding, Severity
from fuligo.config.secret import hide_credentials
from fuligo.config.topology import EngineGroupSpec


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
    """Layers of the stage that compute their own sparse index (DSA), from 0."""
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """Coordinates of a trainer rank in each parallel dimension (Megatron's order tp-cp-ep-dp-pp, tp innermost)."""

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
    """Coordinates of an engine rank."""

    group: int
    """Index into `ClusterLayout.engine_groups`."""
    engine: int
    """Number of the engine among all engines of the run."""
    rank: int
    tp: int
    pp: int
    dp: int
    """Data-parallel rank of attention; 0 without DP attention."""
    ep: int


@dataclass(frozen=True, slots=True)
class PlacedGpu:
    """GPU of the cluster with its trainer and engine rank."""

    node: int
    local_index: int
    trainer: TrainerRank | None
    engine: EngineRank | None
    """Trainer and engine are both set on GPUs that they share, and neither on unused GPUs and those of a placeholder."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Group of engines with equal settings."""

    model: str
    worker_type: str
    """regular, prefill, decode or placeholder."""
    num_engines: int
    num_gpus_per_engine: int
    tp: int
    pp: int
    dp: int
    ep: int
    num_gpus: int
    """GPUs of the group; a placeholder keeps them free."""

    @classmethod
    def of(cls, spec: EngineGroupSpec) -> Self:
        sizes = (spec.tp_size, spec.pp_size, spec.dp_size, spec.ep_size)
        return cls(spec.model, spec.worker_type, spec.num_engines, spec.num_gpus_per_engine, *sizes, spec.num_gpus)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Placement of all ranks."""

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
    """Sizes of the trainer's dimensions; for the torch backend all but dp are 1."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Part of a memory bar."""

    name: str
    """weights, gradients, optimizer, activations, logits, communication, kv_cache, graphs, runtime, ..."""
    num_bytes: int
    note: str
    """Derivation, with the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """Peak memory of one kind of GPU, or of the host."""

    owner: str
    """Label of these GPUs, such as `trainer stage 0` or `engines: decode`; `host` for the host."""
    num_gpus: int
    capacity_bytes: int
    items: tuple[MemoryItem, ...]
    pipeline_rank: int | None = None
    """Pipeline rank of the trainer; None for engines and the host."""
    engine_group: int | None = None
    """Index into `ClusterLayout.engine_groups` for the GPUs of engines; None for the trainer and the host. If one bar shows trainer and
    engine together, `pipeline_rank` is set too."""

    @property
    def used_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Capacity of one engine of a group."""

    group: int
    kv_cache_tokens: int
    concurrent_sequences: int
    """Sequences of the longest prompt and response that fit, limited by the engine's running requests."""

    @property
    def holds_one(self) -> bool:
        return self.concurrent_sequences >= 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of one step on the timeline."""

    name: str
    """rollout, prefill (of a served teacher), score, train, optimizer, sync, onload or offload."""
    lane: str
    """trainer, engines, or teacher if engines serve one."""
    start_s: float
    duration_s: float
    flops: float
    """FLOPs over all GPUs; 0 if the phase only moves bytes."""
    note: str
    """Assumption behind the duration (MFU, bandwidth), with its number."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Change of flags that makes the run fit, and its cost."""

    flags: tuple[str, ...]
    """Flags as typed: `--recompute-granularity full`."""
    saved_bytes: int
    cost: str
    """Cost in words, such as `+33% of the trainer's FLOPs`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Values chosen for flags that are not set."""

    changes: tuple[Change, ...]
    reason: str
    """Why these values: one clause, with the figures that led to them."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Maximum disk space of checkpoints and exports."""

    checkpoint_bytes: int
    """Weights and optimizer of one checkpoint."""
    num_checkpoints: int | None
    """Checkpoints at a time, the one being written included; None if it depends on the number of prompts."""
    export_bytes: int
    """One export of `--save-hf`: 16 bits per parameter of the model, 32 of an adapter; 0 without exports."""
    num_exports: int | None
    """Exports on disk at the end of the run; None if their number depends on the number of prompts."""

    @property
    def is_known(self) -> bool:
        """True if the number of files does not depend on the number of prompts."""
        return self.num_checkpoints is not None and self.num_exports is not None

    @property
    def used_bytes(self) -> int:
        """Total size of all files; a kind whose number is unknown is counted once."""
        checkpoints = 1 if self.num_checkpoints is None else self.num_checkpoints
        exports = 1 if self.num_exports is None else self.num_exports
        return checkpoints * self.checkpoint_bytes + exports * self.export_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: findings of the rules, and placement, memory and time of one step."""

    name: str
    model_type: str
    num_parameters: int
    num_active_parameters: int
    num_mtp_parameters: int
    num_adapter_parameters: int
    """Parameters of the LoRA adapter that is trained; 0 without one."""
    gpu: str
    findings: tuple[Finding, ...]
    layout: ClusterLayout | None = None
    """Placement of all ranks. None if errors prevent a layout; then the following fields, except `choices`, are empty too."""
    memory: tuple[MemoryBar, ...] = ()
    capacities: tuple[EngineCapacity, ...] = ()
    phases: tuple[Phase, ...] = ()
    """Phases of one step, in order."""
    step_s: float = 0.0
    suggestions: tuple[Suggestion, ...] = ()
    """Changes that make the run fit: at most three, the cheapest first; empty if everything fits."""
    assumptions: tuple[str, ...] = ()
    """Assumptions of the estimates, one sentence each."""
    disk: Disk | None = None
    """Disk space of checkpoints and exports; None without a layout, or if the run saves nothing."""
    choices: tuple[Choice, ...] = ()
    """Values chosen for flags that were not given."""


SCHEMA_VERSION = 1
"""Incremented when a key changes its meaning or is removed, not when one is added."""


def plan_document(plan: Plan, config: Config, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document that `--json` writes: plain values only, numbers in the units that their keys name.

    `notes` are the warnings of the command-line parser.
    """
    defaults = Config().model_dump(mode="json")
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": plan.name,
        "valid": not any(finding.severity is Severity.ERROR for finding in plan.findings),
        "gpu": plan.gpu,
        "model": {
            "model_type": plan.model_type,
            "num_parameters": plan.num_parameters,
            "num_active_parameters": plan.num_active_parameters,
            "num_mtp_parameters": plan.num_mtp_parameters,
            "num_adapter_parameters": plan.num_adapter_parameters,
        },
        "choices": [
            {"flags": [change_text(change, config) for change in choice.changes], "reason": choice.reason} for choice in plan.choices
        ],
        "findings": [{**asdict(finding), "fix": [change_text(change, config) for change in finding.fix]} for finding in plan.findings],
        "notes": notes,
        "layout": None if plan.layout is None else asdict(plan.layout),
        "memory": [
            {**asdict(bar), "used_bytes": bar.used_bytes, "free_bytes": bar.capacity_bytes - bar.used_bytes, "fits": bar.fits}
            for bar in plan.memory
        ],
        "engine_capacities": [asdict(capacity) for capacity in plan.capacities],
        "step": {"duration_s": plan.step_s, "phases": [asdict(phase) for phase in plan.phases]},
        "disk": None if plan.disk is None else {**asdict(plan.disk), "used_bytes": plan.disk.used_bytes},
        "suggestions": [asdict(suggestion) for suggestion in plan.suggestions],
        "assumptions": plan.assumptions,
        "settings": [
            {"group": group, "name": name, "value": value, "is_default": name in defaults[group] and defaults[group][name] == value}
            for group, values in config.model_dump(mode="json").items()
            for name, value in values.items()
        ],
    }
    # Tuples become lists, so that the document equals the parsed file. Plans are shared, so passwords in URLs are hidden.
    return json.loads(hide_credentials(json.dumps(document)))
