"""Settings of the Megatron trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fuligo.config.groups import OptimizerFlags, ParallelFlags, TrainFlags
from fuligo.layout.megatron import Layout
from fuligo.models.architecture import Activation, Architecture, Numerics
from fuligo.models.routing import RoutingShape
from fuligo.trainer.packing import Capacity, Cost, MicroBatchPlan, MicroBatchSchedule, pack
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.shared_prefixes import SharedPrefixes, find_shared_prefixes
from fuligo.types import TrainSample


@dataclass(slots=True, frozen=True)
class SparseLayers:
    """Facts of sparse attention that are not in MODEL_ARGS."""

    computing: frozenset[int]
    """Layers that compute their token choice, counted from 0; each other layer takes the choice of the nearest of them below."""
    rotary_interleaved: bool
    """As in `SparseIndex`."""

    @classmethod
    def of(cls, architecture: Architecture) -> Self | None:
        """Return the facts of a model; None if its attention is not sparse."""
        if architecture.sparse_index is None:
            return None
        computing = frozenset(layer.number for layer in architecture.layers if layer.computes_index)
        return cls(computing, architecture.sparse_index.rotary_interleaved)


@dataclass(slots=True, frozen=True)
class MegatronTrainerSettings(TrainerSettings):
    layout: Layout = field(default_factory=Layout)
    model_flags: Mapping[str, Any] = field(default_factory=dict)
    """MODEL_ARGS, names with underscores: config.json's (`models.stated_flags`) overridden by the command line's, together with every
    other pass-through argument of Megatron.
    """
    numerics: Numerics = field(default_factory=Numerics)
    """Facts of the layers; those that Megatron has a flag for are also in `model_flags`, which takes precedence."""
    sparse_layers: SparseLayers | None = None
    """Layers with sparse attention; None: every token attends to all before it."""
    model_provider: str | None = None
    """Path of a function that builds the stages (`provider`); None: fuligo builds them."""
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    """Flags of recomputation; `layout` has the sizes."""
    mtp: TrainFlags = field(default_factory=TrainFlags)
    """Flags of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    optimizer_place: OptimizerFlags = field(default_factory=OptimizerFlags)
    """Flags of device, sharding and precision of the optimizer's state; `optimizer` has the others."""
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    """Transport of tokens to their experts."""
    deepep: bool = False
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    gradients_in_fp32: bool = True
    """Gradients are summed and reduced in float32 (`--accumulate-allreduce-grads-in-fp32`)."""
    routing: RoutingShape | None = None
    """Shape of the experts that samples name, to which their tokens go in training; None: the routers choose in every pass."""
    records_routing: bool = False
    """`score` records the routers' choices in the samples; else the samples name them already, and `score` replays them."""
    pad_multiple_tokens: int = 128
    """Packed rows are padded to a multiple of it."""

    @property
    def num_mtp_layers(self) -> int:
        """MTP layers that are loaded with the model."""
        return self.mtp.mtp_num_layers or 0

    @property
    def activation(self) -> Activation:
        """Activation of the MLPs; `--override-model-config --swiglu` overrides config.json's."""
        return Activation.SILU if self.model_flags.get("swiglu") else self.numerics.activation

    @property
    def backend_environment(self) -> Mapping[str, str]:
        """Variables that Megatron relies on.

        Kernels have one queue, so that a collective's kernels start before the product that they overlap with. The products of all experts
        are one kernel where TransformerEngine has it (Hopper, bf16, forward and towards the inputs), because launching one for each expert
        takes the CPU longer than it takes the GPU to compute them. On a CPU the compiler is off, because importing it, as Megatron's
        decorators do, takes longer than importing the rest of Megatron.
        """
        if self.device == "cpu":
            return {"TORCHDYNAMO_DISABLE": "1"}
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}

    @property
    def fuses_gradient_sums(self) -> bool:
        """True if TransformerEngine's products add a weight's gradient to that of earlier micro-batches."""
        return self.device == "cuda" and self.lora is None and not self.model_flags.get("no_gradient_accumulation_fusion")

    @property
    def needs_process_group(self) -> bool:
        """Megatron needs its groups even for one rank."""
        return True

    def replica_of(self, rank: int) -> int:
        return self.layout.replica_of(rank)

    def micro_batch_schedules(
        self, samples: Sequence[TrainSample], capacity: Capacity, balance_by: Cost | None
    ) -> list[MicroBatchSchedule]:
        """Return the schedules as every trainer does; all rows of all replicas get the length of the longest if that is needed."""
        layout, lengths = self.layout, [len(sample.tokens) for sample in samples]
        # The interleaved schedule goes through its stages in groups of as many micro-batches as there are pipeline ranks.
        multiple_of = layout.pp if layout.vpp > 1 else 1
        prefixes = self.shared_prefixes(samples)
        replicas = pack(lengths, capacity, num_ranks=layout.dp, multiple_of=multiple_of, balance_by=balance_by, prefixes=prefixes)
        longest = None
        # All-gathered experts' tokens: every rank must bring as many, and Megatron refuses to send lengths with them.
        gathers = bool(self.model_flags.get("num_experts")) and self.dispatcher == "allgather"
        if gathers and (layout.pp > 1 or layout.ep > 1):
            rows = (_row_lengths(plan, lengths) for plans in replicas for plan in plans)
            longest = max(layout.row_tokens(row, self.pad_multiple_tokens) for row in rows)
        return [MicroBatchSchedule(plans, longest) for plans in replicas]

    def shared_prefixes(self, samples: Sequence[TrainSample]) -> SharedPrefixes | None:
        """Return what samples share: tokens that go to the same experts, and before which MTP layers see the same tokens."""
        if not self.shares_prefixes:
            return None
        routing = () if self.routing is None else [sample.routed_experts for sample in samples]
        look_ahead = self.num_mtp_layers if self.mtp.enable_mtp_training else 0
        return find_shared_prefixes([sample.tokens[:-1] for sample in samples], routing=routing, look_ahead=look_ahead)


def _row_lengths(plan: MicroBatchPlan, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of a row's sequences; a row that is a tree is one sequence."""
    own = [lengths[i] - 1 for i in plan.samples]
    return [sum(own) - sum(plan.shared)] if any(plan.shared) else own
