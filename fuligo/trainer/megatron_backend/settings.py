"""What the Megatron trainer needs to know beside what every trainer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fuligo.layout.megatron import Layout
from fuligo.models.architecture import Architecture
from fuligo.models.routing import RoutingShape
from fuligo.trainer.packing import Capacity, Cost, MicroBatchSchedule, pack
from fuligo.trainer.ranks.settings import TrainerSettings


@dataclass(slots=True, frozen=True)
class Recomputation:
    """Which activations are computed again in the backward pass; names and meanings are Megatron's."""

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    """Of selective recomputation; none: core_attn."""


@dataclass(slots=True, frozen=True)
class MTPSettings:
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    num_layers: int = 0
    """Loaded with the model; 0: none."""
    trained: bool = False
    loss_scale: float = 0.2
    joint: bool = False
    """Their loss also trains the model that they stand on, its embedding and its head."""


@dataclass(slots=True, frozen=True)
class SparseLayers:
    """Of sparse attention, what MODEL_ARGS do not say."""

    computing: frozenset[int]
    """The layers that compute their token choice, counted from 0; each other one takes that of the nearest of them below."""
    rotary_interleaved: bool
    """As `SparseIndex` has it."""

    @classmethod
    def of(cls, architecture: Architecture) -> Self | None:
        """None: the model's attention is not sparse."""
        if architecture.sparse_index is None:
            return None
        computing = frozenset(layer.number for layer in architecture.layers if layer.computes_index)
        return cls(computing, architecture.sparse_index.rotary_interleaved)


@dataclass(slots=True, frozen=True)
class OptimizerPlace:
    """Where the optimizer's state is and how precise."""

    distributed: bool = True
    """Spread over the data-parallel ranks."""
    on_cpu: bool = False
    overlap_transfers: bool = False
    precision_aware: bool = False


@dataclass(slots=True, frozen=True)
class MegatronTrainerSettings(TrainerSettings):
    layout: Layout = field(default_factory=Layout)
    model_flags: Mapping[str, Any] = field(default_factory=dict)
    """MODEL_ARGS, names with underscores: those of config.json (`models.stated_flags`) under those of the command line, together with
    every other pass-through argument of Megatron."""
    sparse_layers: SparseLayers | None = None
    """None: every token sees all before it."""
    model_provider: str | None = None
    """Path of a function that builds the stages (`provider`); None: fuligo does."""
    recomputation: Recomputation = field(default_factory=Recomputation)
    mtp: MTPSettings = field(default_factory=MTPSettings)
    optimizer_place: OptimizerPlace = field(default_factory=OptimizerPlace)
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    """How tokens reach their experts."""
    deepep: bool = False
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    gradients_in_fp32: bool = True
    """Gradients are summed and reduced in float32 (`--accumulate-allreduce-grads-in-fp32`)."""
    routing: RoutingShape | None = None
    """Of the experts that samples name, to which their tokens go in training; None: the routers choose in every pass."""
    records_routing: bool = False
    """`score` has samples name the experts that the routers choose then; else they do already, and it keeps to them."""
    pad_multiple_tokens: int = 128
    """Packed rows are padded to a multiple of it."""

    @property
    def backend_environment(self) -> Mapping[str, str]:
        """One queue for kernels: those of a collective start before the product that they overlap with, as Megatron relies on.

        And one kernel for the products of all experts where TransformerEngine has it (Hopper, bf16, forward and towards the inputs):
        launching one for each expert takes the CPU longer than it takes the GPU to compute them.
        """
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}

    @property
    def fuses_gradient_sums(self) -> bool:
        """Products that give a weight's gradient add to what micro-batches before have left: TransformerEngine's do."""
        return self.device == "cuda" and not self.model_flags.get("no_gradient_accumulation_fusion")

    @property
    def needs_process_group(self) -> bool:
        """Megatron asks its groups even where there is one rank."""
        return True

    def replica_of(self, rank: int) -> int:
        return self.layout.replica_of(rank)

    def micro_batch_schedules(self, lengths: Sequence[int], capacity: Capacity, balance_by: Cost | None) -> list[MicroBatchSchedule]:
        """As of every trainer; every row of all replicas is as long as the longest where that is needed."""
        layout = self.layout
        # The interleaved schedule goes through its stages in groups of as many micro-batches as there are pipeline ranks.
        multiple_of = layout.pp if layout.vpp > 1 else 1
        replicas = pack(lengths, capacity, num_ranks=layout.dp, multiple_of=multiple_of, balance_by=balance_by)
        longest = None
        if self._needs_equal_rows:
            rows = ([lengths[i] - 1 for i in plan.samples] for plans in replicas for plan in plans)
            longest = max(layout.row_tokens(row, self.pad_multiple_tokens) for row in rows)
        return [MicroBatchSchedule(plans, longest) for plans in replicas]

    @property
    def _needs_equal_rows(self) -> bool:
        """The all-gather of experts' tokens, to which every rank brings as many; Megatron refuses to pass on lengths with it."""
        gathers = bool(self.model_flags.get("num_experts")) and self.dispatcher == "allgather"
        return gathers and (self.layout.pp > 1 or self.layout.ep > 1)
