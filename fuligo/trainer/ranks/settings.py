"""Settings of a trainer, for every backend, with the learning rate of every step: plain data that is sent to every rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.quantised_base import BasePrecision
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity, Cost, MicroBatchSchedule, pack
from fuligo.trainer.profiling import ProfileSettings
from fuligo.trainer.shared_prefixes import SharedPrefixes, find_shared_prefixes
from fuligo.types import TrainSample


@dataclass(slots=True, frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then constant, or a decay to `minimum` that ends after `decay_steps` and stays there."""

    peak: float
    minimum: float = 0.0
    style: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    """Optimizer steps from the start of training, warm-up included, until `minimum`."""

    def at(self, step: int) -> float:
        """Return the learning rate of the 0-based optimizer step; the warm-up's first step already has peak / (warmup_steps + 1)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.style == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        share = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.minimum + (self.peak - self.minimum) * share


@dataclass(slots=True, frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov & Hutter 2019)."""

    schedule: LearningRateSchedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Decoupled; matrices only, not biases and norms."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 clips nothing."""


@dataclass(slots=True, frozen=True)
class TrainedParameters:
    """Selection of the parameters to train: all, those that match one of `only`, or those that match none of `frozen` (`re.search`)."""

    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class LoraSettings:
    """Adapter that is trained instead of the policy's own weights."""

    adapter: AdapterConfig
    initial_adapter: Path | None = None
    """PEFT directory that the adapter begins with; None: B begins as zeros."""
    is_merged: bool = False
    """Engines receive the weights with the adapter merged into them; otherwise the adapter, which they apply."""
    is_named: bool = False
    """Engines know adapters by name and already have the base weights."""
    base_precision: BasePrecision | None = None
    """Storage of the base's linear layers; None: as loaded."""


@dataclass(slots=True, frozen=True)
class CriticSettings:
    """Value model in addition to the policy, on the same ranks and of the same architecture; all its parameters are trained."""

    initial_weights: Path
    """Hugging Face directory, or distributed checkpoint (Megatron). An output layer of one row is its head; any other is left out, and the
    head begins as zeros.
    """
    optimizer: OptimizerSettings
    clip: float = 0.2
    """Values further than this from where they were before the rollout's first optimizer step are clipped."""
    num_only_rollouts: int = 0
    """First rollouts of the value model, in which the policy does not learn."""
    may_begin_at_resume: bool = False
    """Resume from a checkpoint without a value model and begin one with `initial_weights`."""


@dataclass(slots=True, frozen=True)
class TrainerSettings:
    """Settings that every backend has."""

    hf_checkpoint: Path
    """Directory of the tokenizer files and of the data type that weights are sent in."""
    initial_weights: Path
    """Hugging Face directory of the initial weights, or distributed checkpoint (Megatron)."""
    optimizer: OptimizerSettings
    loss: LossSettings = field(default_factory=LossSettings)
    reference_weights: Path | None = None
    """Weights of the reference model, likewise; None: the loss needs none."""
    teacher_weights: Path | None = None
    """Weights of the teacher, likewise; None: there is none, or an engine serves it."""
    ref_update_interval: int | None = None
    """Rollouts after which the policy's weights become the reference."""
    critic: CriticSettings | None = None
    """Settings of the value model; None if advantages need no values."""
    needs_old_logprobs: bool = False
    """`score` computes them: there are several optimizer steps per rollout, or rewards shaped by the KL to the reference."""
    temperature: float = 1.0
    """Sampling temperature: log-probabilities are those of the distribution that was sampled from."""
    capacity: Capacity = field(default_factory=Capacity)
    score_capacity: Capacity = field(default_factory=Capacity)
    """Limits of a micro-batch without gradient."""
    shares_prefixes: bool = False
    """A micro-batch holds each prefix that several samples share, and computes it, only once."""
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    balance_data: bool = False
    skips_zero_advantages: bool = False
    """Samples whose advantages are all 0 are not trained, nor are optimizer steps that have no others."""
    trained: TrainedParameters = field(default_factory=TrainedParameters)
    lora: LoraSettings | None = None
    """Adapter to train; None: the weights themselves are trained. The reference is then the policy with its adapter off."""
    device: Literal["cpu", "cuda"] = "cpu"
    shares_device: bool = False
    """Engines use the same GPUs, so memory that the trainer does not need must be free. Otherwise it keeps freed memory: returning it and
    allocating it again costs a tenth of a second per step.
    """
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of computation; weights, sums of gradients and optimizer state are float32."""
    sync_dtype: Literal["fp32", "bf16"] | None = None
    """Data type in which engines receive the weights, which they compute in; None: that of `hf_checkpoint`."""
    engine_format: EngineFormat = field(default_factory=EngineFormat)
    num_ranks: int = 1
    seed: int = 1234
    profile: ProfileSettings | None = None
    """Rollouts and ranks to profile; None for none."""
    command_timeout_s: float = 1800.0
    """Deadline of each command that all ranks run: loading, a rollout's training, a save."""

    def with_absolute_paths(self) -> Self:
        """Make all paths absolute, for ranks in other working directories."""
        reference, teacher, critic, lora = self.reference_weights, self.teacher_weights, self.critic, self.lora
        start = None if lora is None else lora.initial_adapter
        return replace(
            self,
            hf_checkpoint=self.hf_checkpoint.absolute(),
            initial_weights=self.initial_weights.absolute(),
            reference_weights=None if reference is None else reference.absolute(),
            teacher_weights=None if teacher is None else teacher.absolute(),
            critic=None if critic is None else replace(critic, initial_weights=critic.initial_weights.absolute()),
            lora=lora if lora is None or start is None else replace(lora, initial_adapter=start.absolute()),
        )

    @property
    def scores(self) -> bool:
        """True if something is computed for a whole rollout before its first optimizer step."""
        others = (self.reference_weights, self.teacher_weights, self.critic)
        return self.needs_old_logprobs or any(other is not None for other in others)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that a rank sets before it touches its device, unless they are set already.

        Pinning the host memory for a 4B model and its optimizer state, when they first leave a shared GPU, takes 17.8 s in one thread and
        5.0 s this way (docs/benchmarks-gpu.md).
        """
        if self.shares_device and self.device == "cuda":
            pinned = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:16"}
            return {**self.backend_environment, **pinned}
        return self.backend_environment

    @property
    def backend_environment(self) -> Mapping[str, str]:
        """Variables that the backend adds to `environment`."""
        return {}

    @property
    def needs_process_group(self) -> bool:
        """True if there are several ranks, or the backend needs a process group even for one."""
        return self.num_ranks > 1 or self.device == "cuda"

    def replica_of(self, rank: int) -> int:
        """Return the data-parallel replica of a rank; the ranks of one replica compute the same samples."""
        return rank

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas."""
        return 1 + max(map(self.replica_of, range(self.num_ranks)))

    def micro_batch_schedules(
        self, samples: Sequence[TrainSample], capacity: Capacity, balance_by: Cost | None
    ) -> list[MicroBatchSchedule]:
        """Return each data-parallel replica's micro-batches of samples that go through the model together.

        Args:
            samples: samples of the step; those that share prefixes go together if `shares_prefixes`.
            capacity: capacity of a micro-batch.
            balance_by: cost to balance over the replicas; None: none.

        Raises:
            TrainerError: there is no sample.
        """
        lengths = [len(sample.tokens) for sample in samples]
        ranks = pack(lengths, capacity, num_ranks=self.num_ranks, balance_by=balance_by, prefixes=self.shared_prefixes(samples))
        return [MicroBatchSchedule(plans) for plans in ranks]

    def shared_prefixes(self, samples: Sequence[TrainSample]) -> SharedPrefixes | None:
        """Return the prefixes of tokens that samples share and that are computed once; None without `shares_prefixes`."""
        return find_shared_prefixes([sample.tokens[:-1] for sample in samples]) if self.shares_prefixes else None
