"""What a trainer needs to know, whichever backend: plain data that travels to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from fuligo.formats.weight_manifest import EngineFormat
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity, Cost, MicroBatchSchedule, pack
from fuligo.trainer.schedule import LearningRateSchedule


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
    """Which parameters are trained: all, those that match one of `only`, or those that match none of `frozen`. Regexes, searched."""

    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class CriticSettings:
    """A value model beside the policy, on the same ranks and of the same architecture, all of whose parameters are trained."""

    initial_weights: Path
    """Hugging Face directory, or distributed checkpoint (Megatron). An output layer of one row is its head; any other is left out, and the
    head begins as zeros."""
    optimizer: OptimizerSettings
    clip: float = 0.2
    """How far a value counts as moved from where it was before the rollout's first optimizer step."""
    num_only_rollouts: int = 0
    """First rollouts of the value model, from which it alone learns."""
    may_begin_at_resume: bool = False
    """A checkpoint without a value model is gone on from, and it begins with `initial_weights`."""


@dataclass(slots=True, frozen=True)
class TrainerSettings:
    """Of any backend."""

    hf_checkpoint: Path
    """Tokenizer files and the data type that weights are sent in."""
    initial_weights: Path
    """Hugging Face directory of the first weights, or distributed checkpoint (Megatron)."""
    optimizer: OptimizerSettings
    loss: LossSettings = field(default_factory=LossSettings)
    reference_weights: Path | None = None
    """Of the reference model, likewise; None: the loss needs none."""
    teacher_weights: Path | None = None
    """Of the teacher, likewise; None: there is none, or an engine serves it."""
    ref_update_interval: int | None = None
    """Rollouts after which the reference takes the policy's weights."""
    critic: CriticSettings | None = None
    """None: advantages need no values."""
    needs_old_logprobs: bool = False
    """`score` computes them: several optimizer steps a rollout, or rewards shaped by the KL to the reference."""
    temperature: float = 1.0
    """Of sampling: log-probabilities are those of the distribution that was sampled from."""
    capacity: Capacity = field(default_factory=Capacity)
    """Of a micro-batch in training."""
    score_capacity: Capacity = field(default_factory=Capacity)
    """Of a micro-batch without gradient."""
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    balance_data: bool = False
    trained: TrainedParameters = field(default_factory=TrainedParameters)
    device: Literal["cpu", "cuda"] = "cpu"
    shares_device: bool = False
    """Engines compute on the same GPUs: what the trainer does not hold on to must be theirs. On its own it keeps freed memory, for giving
    it back and asking for it again costs a tenth of a second a step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute type; weights, gradients' sums and optimizer state are float32."""
    sync_dtype: Literal["fp32", "bf16"] | None = None
    """What engines get the weights in: what they compute in; None: the data type of `hf_checkpoint`."""
    engine_format: EngineFormat = field(default_factory=EngineFormat)
    num_ranks: int = 1
    seed: int = 1234
    command_timeout_s: float = 1800.0
    """Deadline of whatever all ranks do together: loading, a rollout's training, a save."""

    def with_absolute_paths(self) -> Self:
        """For ranks in other working directories."""
        reference, teacher, critic = self.reference_weights, self.teacher_weights, self.critic
        return replace(
            self,
            hf_checkpoint=self.hf_checkpoint.absolute(),
            initial_weights=self.initial_weights.absolute(),
            reference_weights=None if reference is None else reference.absolute(),
            teacher_weights=None if teacher is None else teacher.absolute(),
            critic=None if critic is None else replace(critic, initial_weights=critic.initial_weights.absolute()),
        )

    @property
    def scores(self) -> bool:
        """Something is computed for a whole rollout before its first optimizer step."""
        others = (self.reference_weights, self.teacher_weights, self.critic)
        return self.needs_old_logprobs or any(other is not None for other in others)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of a rank's process that must be there before it touches its device; what is set already stays.

        Pinning the host memory for a 4B model and its optimizer state, when they first leave a shared GPU, takes 17.8 s in one thread and
        5.0 s this way (docs/benchmarks-gpu.md).
        """
        if self.shares_device and self.device == "cuda":
            pinned = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:16"}
            return {**self.backend_environment, **pinned}
        return self.backend_environment

    @property
    def backend_environment(self) -> Mapping[str, str]:
        """What the backend adds to it."""
        return {}

    @property
    def needs_process_group(self) -> bool:
        """The ranks talk, or the backend asks for a group even where there is one."""
        return self.num_ranks > 1 or self.device == "cuda"

    def replica_of(self, rank: int) -> int:
        """Which data-parallel replica a rank is part of; the ranks of one compute the same samples."""
        return rank

    def micro_batch_schedules(self, lengths: Sequence[int], capacity: Capacity, balance_by: Cost | None) -> list[MicroBatchSchedule]:
        """What each data-parallel replica computes of samples that go through the model together.

        Args:
            lengths: tokens of every sample.
            capacity: of a micro-batch.
            balance_by: given, replicas get about the same total cost.

        Raises:
            TrainerError: there are fewer samples than replicas.
        """
        return [MicroBatchSchedule(plans) for plans in pack(lengths, capacity, num_ranks=self.num_ranks, balance_by=balance_by)]
