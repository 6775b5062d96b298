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
    """Properties of sparse attention that are not in MODEL_ARGS."""

    computing: frozenset[int]
    """Layers, counted from 0, that compute a choice of tokens; every other layer reuses the choice of the nearest such layer below it."""
    rotary_interleaved: bool
    """True: the indexer rotates interleaved pairs; see `SparseIndex`."""

    @classmethod
    def of(cls, architecture: Architecture) -> Self | None:
        """Return the properties of a model; None if its attention is not sparse."""
        if architecture.sparse_index is None:
            return None
        computing = frozenset(layer.number for layer in architecture.layers if layer.computes_index)
        return cls(computing, architecture.sparse_index.rotary_interleaved)


@dataclass(slots=True, frozen=True)
class MegatronTrainerSettings(TrainerSettings):
    layout: Layout = field(default_factory=Layout)
    model_flags: Mapping[str, Any] = field(default_factory=dict)
    """MODEL_ARGS by name with underscores: those of config.json (`models.stated_flags`), overridden by the command line, and all other
    pass-through arguments of Megatron.
    """
    numerics: Numerics = field(default_factory=Numerics)
    """Numerical properties of the layers. Those with a Megatron flag are also in `model_flags`, which takes precedence."""
    sparse_layers: SparseLayers | None = None
    """Properties of sparse attention; None: attention is dense."""
    model_provider: str | None = None
    """Path of the hook that builds the stages (`provider`); None: fuligo builds them."""
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    """Flags of recomputation; the parallel sizes are in `layout`."""
    mtp: TrainFlags = field(default_factory=TrainFlags)
    """Flags of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    optimizer_place: OptimizerFlags = field(default_factory=OptimizerFlags)
    """Flags of the device, sharding and precision of the optimizer's state; its other settings are in `optimizer`."""
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    """Token dispatcher of MoE layers (--moe-token-dispatcher-type)."""
    deepep: bool = False
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    gradients_in_fp32: bool = True
    """True to accumulate and reduce gradients in float32 (`--accumulate-allreduce-grads-in-fp32`)."""
    routing: RoutingShape | None = None
    """Shape of the recorded experts that training replays; None: the routers choose in every pass."""
    records_routing: bool = False
    """True: `score` returns a record of the routers' choices with the scores; False: it replays the records of samples that have one."""
    pad_multiple_tokens: int = 128
    """Multiple to which the number of tokens of a packed row is padded."""

    @property
    def num_mtp_layers(self) -> int:
        """Number of MTP layers that are loaded with the model."""
        return self.mtp.mtp_num_layers or 0

    @property
    def activation(self) -> Activation:
        """Activation of the MLPs; `--override-model-config --swiglu` overrides that of config.json."""
        return Activation.SILU if self.model_flags.get("swiglu") else self.numerics.activation

    @property
    def backend_environment(self) -> Mapping[str, str]:
        """Environment variables that Megatron relies on.

        CUDA_DEVICE_MAX_CONNECTIONS=1 makes the kernels of a collective start before the GEMM that they overlap with.
        NVTE_USE_CUTLASS_GROUPED_GEMM computes all experts in one kernel where TransformerEngine has one (Hopper, bf16, forward and input
        gradients), because launching one kernel per expert takes longer on the CPU than the computation on the GPU.
        NVTE_FP8_BLOCK_SCALING_FP32_SCALES makes the scales of FP8 blocks those of block-quantized checkpoints, which engines sample with;
        TransformerEngine would round them up to powers of two. On a CPU, TORCHDYNAMO_DISABLE avoids importing the compiler through
        Megatron's decorators, which takes longer than importing the rest of Megatron.
        """
        if self.device == "cpu":
            return {"TORCHDYNAMO_DISABLE": "1"}
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_USE_CUTLASS_GROUPED_GEMM": "1", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}

    @property
    def uses_fp8(self) -> bool:
        """True if linear layers compute in FP8 (--fp8-format), from weights that stay in bf16."""
        return self.model_flags.get("fp8_format") is not None

    @property
    def fuses_gradient_sums(self) -> bool:
        """True if TransformerEngine's GEMMs accumulate weight gradients directly into those of earlier micro-batches."""
        return self.device == "cuda" and self.lora is None and not self.model_flags.get("no_gradient_accumulation_fusion")

    @property
    def needs_process_group(self) -> bool:
        """True, because Megatron needs process groups even for one rank."""
        return True

    def replica_of(self, rank: int) -> int:
        return self.layout.replica_of(rank)

    def micro_batch_schedules(
        self, samples: Sequence[TrainSample], capacity: Capacity, balance_by: Cost | None
    ) -> list[MicroBatchSchedule]:
        """Pack samples as in the base class; pad all rows of all replicas to the same length if the token dispatcher needs that."""
        layout, lengths = self.layout, [len(sample.tokens) for sample in samples]
        # The interleaved schedule runs micro-batches in groups of the number of pipeline ranks.
        multiple_of = layout.pp if layout.vpp > 1 else 1
        prefixes = self.shared_prefixes(samples)
        replicas = pack(lengths, capacity, num_ranks=layout.dp, multiple_of=multiple_of, balance_by=balance_by, prefixes=prefixes)
        longest = None
        # The all-gather dispatcher needs the same number of tokens on every rank, and Megatron does not support variable lengths with it.
        gathers = bool(self.model_flags.get("num_experts")) and self.dispatcher == "allgather"
        if gathers and (layout.pp > 1 or layout.ep > 1):
            rows = (_row_lengths(plan, lengths) for plans in replicas for plan in plans)
            longest = max(layout.row_tokens(row, self.pad_multiple_tokens) for row in rows)
        return [MicroBatchSchedule(plans, longest) for plans in replicas]

    def shared_prefixes(self, samples: Sequence[TrainSample]) -> SharedPrefixes | None:
        """Return the prefixes that samples share and that are computed once; None without `shares_prefixes`.

        A token is shared only if the samples have the same recorded experts and the same inputs of MTP layers for it.
        """
        if not self.shares_prefixes:
            return None
        routing = () if self.routing is None else [sample.routed_experts for sample in samples]
        look_ahead = self.num_mtp_layers if self.mtp.enable_mtp_training else 0
        return find_shared_prefixes([sample.tokens[:-1] for sample in samples], routing=routing, look_ahead=look_ahead)


def _row_lengths(plan: MicroBatchPlan, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of a row's sequences; a row with shared prefixes is one sequence."""
    own = [lengths[i] - 1 for i in plan.samples]
    return [sum(own) - sum(plan.shared)] if any(plan.shared) else own
