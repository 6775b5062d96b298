"""Trainer settings that all backends share, including the learning-rate schedule: plain data that is sent to every rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.quantized_base import BasePrecision
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity, Cost, MicroBatchSchedule, pack
from fuligo.trainer.profiling import ProfileSettings
from fuligo.trainer.shared_prefixes import SharedPrefixes, find_shared_prefixes
from fuligo.types import TrainSample


@dataclass(slots=True, frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then a constant rate, or a decay to `minimum`, which is reached after `decay_steps` and kept."""

    peak: float
    minimum: float = 0.0
    style: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    """Number of optimizer steps, warm-up included, until `minimum` is reached."""

    def at(self, step: int) -> float:
        """Return the learning rate of the 0-based optimizer step. The first warm-up step has peak / (warmup_steps + 1), not 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.style == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        share = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.minimum + (self.peak - self.minimum) * share


@dataclass(slots=True, frozen=True)
class OptimizerSettings:
    """Settings of AdamW (Loshchilov & Hutter 2019)."""

    schedule: LearningRateSchedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms do not decay."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 disables clipping."""


@dataclass(slots=True, frozen=True)
class TrainedParameters:
    """Regular expressions (`re.search`) that select the parameters to train.

    These are the ones that match `only`, or the ones that do not match `frozen`; all if both are empty.
    """

    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class LoraSettings:
    """Settings of the LoRA adapter that is trained instead of the policy's weights."""

    adapter: AdapterConfig
    initial_adapter: Path | None = None
    """PEFT directory of the adapter to start from; None: B starts at zero."""
    is_merged: bool = False
    """True: engines receive all weights with the adapter merged in; False: they receive the adapter and apply it."""
    is_named: bool = False
    """True: engines load adapters by name and already have the base weights."""
    base_precision: BasePrecision | None = None
    """Storage of the base model's linear layers; None: as loaded."""


@dataclass(slots=True, frozen=True)
class CriticSettings:
    """Value model in addition to the policy, on the same ranks and of the same architecture; all its parameters are trained."""

    initial_weights: Path
    """Hugging Face directory, or distributed checkpoint (Megatron). An output layer of one row becomes the value head; any other output
    layer is ignored, and the head starts at zero.
    """
    optimizer: OptimizerSettings
    clip: float = 0.2
    """Largest change of a value since before the rollout's first optimizer step; the loss clips larger changes."""
    num_only_rollouts: int = 0
    """Number of rollouts, counted from the value model's start, in which only the value model is trained."""
    may_begin_at_resume: bool = False
    """True to allow a resume from a checkpoint without a value model; the value model then starts from `initial_weights`."""


@dataclass(slots=True, frozen=True)
class TrainerSettings:
    """Settings that all backends share."""

    hf_checkpoint: Path
    """Hugging Face directory of config.json and tokenizer; unless `sync_dtype` is set, weights are sent in its data type."""
    initial_weights: Path
    """Hugging Face directory of the initial weights, or distributed checkpoint (Megatron)."""
    optimizer: OptimizerSettings
    loss: LossSettings = field(default_factory=LossSettings)
    reference_weights: Path | None = None
    """Weights of the reference model, in the same formats; None if there is no reference model."""
    teacher_weights: Path | None = None
    """Weights of the teacher, in the same formats; None if there is no teacher or an engine serves it."""
    ref_update_interval: int | None = None
    """Number of rollouts after which the policy's weights are copied to the reference; None: never."""
    critic: CriticSettings | None = None
    """Settings of the value model; None if advantages need no values."""
    needs_old_logprobs: bool = False
    """True to compute the old log-probabilities in `score`, before the first optimizer step; see `Config.needs_old_logprobs`."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are those of the distribution that was sampled from."""
    capacity: Capacity = field(default_factory=Capacity)
    """Limits of a micro-batch in training."""
    score_capacity: Capacity = field(default_factory=Capacity)
    """Limits of a micro-batch in passes without gradients."""
    shares_prefixes: bool = False
    """True to store and compute only once a prefix that several samples of a micro-batch share."""
    chunk_tokens: int = 4096
    """Number of tokens whose logits are in memory at a time."""
    balance_data: bool = False
    """True to balance the FLOPs of micro-batches over the data-parallel replicas."""
    skips_zero_advantages: bool = False
    """True to skip samples whose advantages are all 0, and optimizer steps that have only such samples."""
    trained: TrainedParameters = field(default_factory=TrainedParameters)
    lora: LoraSettings | None = None
    """Adapter to train, whose reference is the policy with the adapter off; None: the weights themselves are trained."""
    device: Literal["cpu", "cuda"] = "cpu"
    shares_device: bool = False
    """True if engines use the same GPUs, so the trainer returns memory that it does not need. Otherwise it keeps freed memory, because
    returning and allocating it again costs a tenth of a second per step."""
    stays_on_device: bool = False
    """True to keep weights and optimizer state on the device while engines use it (--no-offload-train); gradients and caches are freed."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of computation. The optimizer's weights and state, and accumulated gradients, are float32 by default."""
    sync_dtype: Literal["fp32", "bf16"] | None = None
    """Data type in which engines receive the weights and compute; None: that of `hf_checkpoint`."""
    engine_format: EngineFormat = field(default_factory=EngineFormat)
    num_ranks: int = 1
    seed: int = 1234
    profile: ProfileSettings | None = None
    """Rollouts and ranks to profile; None: no profiling."""
    command_timeout_s: float = 1800.0
    """Seconds that all ranks have for each command, such as loading, training on a rollout or saving."""

    def with_absolute_paths(self) -> Self:
        """Return a copy in which all paths are absolute, for ranks in other working directories."""
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
        """True if the trainer scores a whole rollout before its first optimizer step."""
        others = (self.reference_weights, self.teacher_weights, self.critic)
        return self.needs_old_logprobs or any(other is not None for other in others)

    @property
    def measures_precision_noise(self) -> bool:
        """True if the backend can measure its precision noise and this noise makes engine and trainer differ."""
        return False

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that a rank sets, unless they are already set, before it uses its device.

        Pinning 10 GiB of host memory at the first offload from a shared GPU takes 5.9 s by default and 2.2 s with the
        PYTORCH_CUDA_ALLOC_CONF set here (docs/benchmarks-gpu.md).
        """
        if self.shares_device and self.device == "cuda":
            pinned = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:16"}
            return {**self.backend_environment, **pinned}
        return self.backend_environment

    @property
    def backend_environment(self) -> Mapping[str, str]:
        """Environment variables that the backend adds to `environment`."""
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
        """Number of data-parallel replicas."""
        return 1 + max(map(self.replica_of, range(self.num_ranks)))

    def micro_batch_schedules(
        self, samples: Sequence[TrainSample], capacity: Capacity, balance_by: Cost | None
    ) -> list[MicroBatchSchedule]:
        """Pack the samples of an optimizer step, or all samples to score; return the micro-batches of each data-parallel replica.

        `balance_by` is the cost to balance over the replicas; None: do not balance. Raises TrainerError if `samples` is empty.
        """
        lengths = [len(sample.tokens) for sample in samples]
        ranks = pack(lengths, capacity, num_ranks=self.num_ranks, balance_by=balance_by, prefixes=self.shared_prefixes(samples))
        return [MicroBatchSchedule(plans) for plans in ranks]

    def shared_prefixes(self, samples: Sequence[TrainSample]) -> SharedPrefixes | None:
        """Return the prefixes that samples share and that are computed once; None without `shares_prefixes`."""
        return find_shared_prefixes([sample.tokens[:-1] for sample in samples]) if self.shares_prefixes else None
