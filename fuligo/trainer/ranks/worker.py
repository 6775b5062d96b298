"""Base classes of the backends' rank workers and critics: the work of a trainer rank apart from the model's passes."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import no_value_model
from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.trainer.adapter_sender import AdapterSender
from fuligo.trainer.host_memory import HostMemory
from fuligo.trainer.metric_sums import mean_of_steps
from fuligo.trainer.packing import Cost
from fuligo.trainer.precision_noise import Unmeasured
from fuligo.trainer.profiling import Timeline, profiled
from fuligo.trainer.ranks.settings import CriticSettings, TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import SampleScores, ScoreShare, StepShare, join_by_position
from fuligo.trainer.step import Progress, StepGradients, total
from fuligo.types import FloatArray, StepResult, TrainSample
from fuligo.weights.colocated import TrainerRanks
from fuligo.weights.senders import WeightSender

logger = logging.getLogger(__name__)


class BaseCritic(ABC):
    """Base class of all backends' critics, which are trained to predict the returns of the policy's samples."""

    learner: Any
    """The backend's `Learner` of the value model."""

    def __init__(self, settings: CriticSettings, world: World) -> None:
        self.settings = settings
        self._world = world

    @abstractmethod
    def values(self, share: ScoreShare) -> dict[int, FloatArray]:
        """Return [R] values by position in the whole list of samples; empty except on the rank that reports for its replica."""

    @abstractmethod
    def gradients(self, step: StepShare) -> StepGradients | None:
        """Compute the gradients of the step's value loss; return None except on the rank that reports for its replica."""

    def end_rollout(self) -> None:
        """Count a rollout whose optimizer steps are done."""
        self.learner.progress.num_rollouts += 1

    def begin_at(self, checkpoint: Path) -> None:
        """Keep the initial value model when the run resumes from a checkpoint without one.

        Raises CheckpointError if the settings do not allow it.
        """
        if not self.settings.may_begin_at_resume:
            raise CheckpointError(no_value_model(checkpoint))
        if self._world.rank == 0:
            logger.info("%s has no value model; starting one from %s", checkpoint, self.settings.initial_weights)


SettingsT = TypeVar("SettingsT", bound=TrainerSettings)
CriticT = TypeVar("CriticT", bound=BaseCritic)
ModelT = TypeVar("ModelT")


class RankWorker(ABC, Generic[SettingsT, CriticT, ModelT]):
    """Worker of one trainer rank, with its part of the models. All ranks call the methods in the same order.

    The methods are those of `trainer.protocol.Trainer`. Samples are passed as the share of the rank's data-parallel replica; other
    arguments are the same on all ranks. One rank of each replica reports its results, and rank 0 returns the result for all samples. The
    constructor of a backend's worker sets the attributes declared here.
    """

    _learner: Any
    """The backend's `Learner` of the policy."""
    critic: CriticT | None
    """Value model with its learner; None without one."""
    reference: ModelT | None
    """Reference model; None if there is none, or it is the policy without its adapter."""
    teacher: ModelT | None
    """Teacher of on-policy distillation; None if the trainer has none."""
    balance_by: Cost | None
    """Cost to balance over the replicas; None: do not balance."""
    _adapter_sender: AdapterSender | None

    def __init__(self, settings: SettingsT, world: World) -> None:
        self.settings = settings
        self.world = world
        self._sender = WeightSender(settings.engine_format, TrainerRanks(world.rank, world.objects))
        self._timeline = Timeline(world.device)
        self._host_memory = HostMemory(world.device)

    @property
    def progress(self) -> Progress:
        return self._learner.progress

    def warm_up(self) -> None:
        """Compile the kernels of a step with made-up samples; by default nothing is compiled. A collective.

        Weights, optimizer and random state stay as they are.
        """

    def precision_noise(self, samples: list[TrainSample]) -> float | Unmeasured | None:
        """Measure how far rounding moves the policy's log-probabilities; return None on ranks other than 0. A collective.

        The result is the mean absolute difference in nats between half precision and float32 over the trained tokens of the samples. Every
        rank computes all samples. Weights, optimizer and random state stay as they are. By default nothing is measured
        (`TrainerSettings.measures_precision_noise`).
        """
        del samples
        return None

    def score(self, share: ScoreShare) -> list[SampleScores] | None:
        """Compute the scores that the settings need; return those of all samples, in order, on rank 0, and None on other ranks."""
        with self._timeline.span("score"):
            olds, recorded = self._old_logprobs(share) if self.settings.needs_old_logprobs else ({}, {})
            refs = self._reference_logprobs(share)
            teachers = {} if self.teacher is None else self._logprobs_of(self.teacher, share)
            values = {} if self.critic is None else self.critic.values(share)
        scored = olds.keys() | refs.keys() | teachers.keys() | values.keys()
        own = {i: SampleScores(olds.get(i), refs.get(i), teachers.get(i), values.get(i)) for i in scored}
        gathered = self.world.gather((own, recorded))
        if gathered is None:
            return None
        return self._with_routing(join_by_position(scores for scores, _ in gathered), [parts for _, parts in gathered])

    def logprobs(self, share: ScoreShare) -> list[FloatArray] | None:
        """Compute the policy's [R] log-probabilities; return those of all samples, in order, on rank 0, and None on other ranks."""
        gathered = self.world.gather(self._policy_logprobs(share))
        return None if gathered is None else join_by_position(gathered)

    def train(self, steps: Sequence[StepShare | None]) -> StepResult:
        """Run the optimizer steps of a rollout. Return the result on rank 0, and an empty one on other ranks.

        Args:
            steps: the replica's share of each optimizer step; None if the step is skipped.

        Raises:
            TrainerError: a loss or a gradient is not finite; that model's weights are as they were before the optimizer step.
        """
        started = time.perf_counter()
        found: list[list[StepGradients]] = []
        metrics: list[dict[str, float]] = []
        with profiled(self.settings.profile, rollout=self.progress.num_rollouts, rank=self.world.rank, device=self.world.device):
            for step in steps:
                if step is None:
                    self.progress.skip_step()
                    continue
                gradients, of_step = self._optimizer_steps(step)
                own = (of_model for of_model in gradients if of_model is not None)
                found.append([replace(of_model, sums=of_model.sums.cpu(), losses=of_model.losses.cpu()) for of_model in own])
                metrics.append(of_step)
        self._end_rollout()
        gathered = self.world.gather((found, self._timeline.take()))
        if gathered is None:
            return StepResult(metrics={}, scores={}, num_tokens=0)
        replicas = [replica for replica, _ in gathered if all(replica)]
        metrics = [{**_means([replica[step] for replica in replicas]), **own} for step, own in enumerate(metrics)]
        policies = [step[-1] for replica in replicas for step in replica]
        num_tokens = sum(gradients.num_tokens for gradients in policies)
        means = {f"train/{name}": value for name, value in mean_of_steps(metrics).items()}
        means["train/tokens_per_s"] = num_tokens / (time.perf_counter() - started)
        if self.settings.shares_prefixes and num_tokens:  # there are no tokens if all steps were skipped
            means["train/shared_prefix_share"] = sum(gradients.num_shared_tokens for gradients in policies) / num_tokens
        scores = {i: score for gradients in policies for i, score in gradients.scores.items()}
        return StepResult(means, scores, num_tokens, rank_spans=[spans for _, spans in gathered])

    @abstractmethod
    def gradients(self, step: StepShare) -> StepGradients | None:
        """Compute the gradients of the step's loss, which stay with the parameters.

        Return None except on the rank that reports for its replica.
        """

    def send_weights(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Gather the policy's weights on all ranks, and send them from rank 0 and from every rank that shares its GPU with an engine.

        Results and errors are those of `WeightSender.send`.
        """
        with self._timeline.span("send"):
            if self._adapter_sender is not None:
                return self._adapter_sender.send(target)
            return self._sender.send(self.named_weights(), target)

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors in the data type of the sync, with an adapter merged in.

        A collective: every rank must iterate to the end.
        """

    @abstractmethod
    def save(self, directory: Path) -> None: ...

    @abstractmethod
    def begin_save(self, directory: Path) -> Future[None]:
        """Begin a save and return its future; rank 0's is done when all ranks have written."""

    @abstractmethod
    def restore(self, directory: Path) -> None: ...

    def offload(self) -> None:
        """Free device memory for engines: that of all tensors, or with `stays_on_device` that of gradients and temporary tensors.

        Optimizer state that stays is allocated now, because engines take the free memory when they start, which is before the first step.
        """
        stays = self.settings.stays_on_device
        with self._timeline.span("offload"):
            self._release_gathered()
            self._host_memory.take(() if stays else self._kept_tensors(), dropped=self._dropped_tensors())
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
            for learner in self._learners() if stays else ():
                learner.allocate_state()

    def onload(self) -> None:
        with self._timeline.span("onload"):
            self._host_memory.give_back()

    def close(self) -> None:
        """Release resources of the backend, such as its process groups; the default process group is destroyed afterwards."""

    @abstractmethod
    def _policy_logprobs(self, share: ScoreShare) -> dict[int, FloatArray]:
        """Return [R] log-probabilities by position in the whole list of samples; empty except on the rank that reports for its replica."""

    @abstractmethod
    def _logprobs_of(self, model: ModelT, share: ScoreShare) -> dict[int, FloatArray]:
        """Return a reference or teacher model's log-probabilities, like `_policy_logprobs`."""

    def _old_logprobs(self, share: ScoreShare) -> tuple[dict[int, FloatArray], Mapping[int, Any]]:
        """Return the policy's log-probabilities before training, and the routing that this rank recorded in these passes."""
        return self._policy_logprobs(share), {}

    def _with_routing(self, scores: list[SampleScores], parts_of_ranks: Sequence[Mapping[int, Any]]) -> list[SampleScores]:
        """Return the scores with the routing that the ranks recorded; unchanged unless the backend records routing."""
        del parts_of_ranks
        return scores

    def _reference_logprobs(self, share: ScoreShare) -> dict[int, FloatArray]:
        """Return the reference model's log-probabilities; with LoRA, the reference is the policy without its adapter."""
        if self.reference is not None:
            return self._logprobs_of(self.reference, share)
        if self.settings.lora is None or self.settings.reference_weights is None:
            return {}
        with self._adapter_off():
            return self._policy_logprobs(share)

    @abstractmethod
    def _adapter_off(self) -> AbstractContextManager[None]:
        """Disable the policy's adapter inside the block."""

    def _optimizer_steps(self, step: StepShare) -> tuple[list[StepGradients | None], dict[str, float]]:
        """Take an optimizer step of the value model, then of the policy unless only the value model is trained.

        Return what `gradients` returned for each trained model, with the policy last, and the step's metrics (`lr`, `grad_norm`, ...).
        """
        num_micro_batches = len(step.schedule.plans)
        found: list[StepGradients | None] = []
        metrics: dict[str, float] = {}
        if self.critic is not None:
            with self._timeline.span("forward, backward"):
                found.append(self.critic.gradients(step))
            with self._timeline.span("optimizer"):
                lr, grad_norm = self.critic.learner.step(found[-1], num_micro_batches)
            metrics = {"critic_lr": lr, "critic_grad_norm": grad_norm}
            if self.critic.learner.progress.num_rollouts < self.critic.settings.num_only_rollouts:
                return found, metrics
        with self._timeline.span("forward, backward"):
            found.append(self.gradients(step))
        with self._timeline.span("optimizer"):
            lr, grad_norm = self._learner.step(found[-1], num_micro_batches)
        return found, {**metrics, "lr": lr, "grad_norm": grad_norm, "num_micro_batches": float(num_micro_batches)}

    def _end_rollout(self) -> None:
        """Count the rollout, update the reference if it is due, and free memory for engines on the same device."""
        self.progress.num_rollouts += 1
        if self.critic is not None:
            self.critic.end_rollout()
        interval = self.settings.ref_update_interval
        if self.reference is not None and interval is not None and self.progress.num_rollouts % interval == 0:
            self._update_reference(self.reference)
        if self.settings.shares_device:
            torch.cuda.empty_cache()  # the engine uses the activations' memory until the next rollout

    @abstractmethod
    def _update_reference(self, reference: ModelT) -> None:
        """Copy the policy's weights to the reference."""

    @property
    def _changed_reference(self) -> ModelT | None:
        """Reference model to save in checkpoints; None if there is none or it never changes."""
        return None if self.settings.ref_update_interval is None else self.reference

    def _learners(self) -> list[Any]:
        """Return the backend's `Learner` of each trained model, the policy's first."""
        return [self._learner] if self.critic is None else [self._learner, self.critic.learner]

    def _release_gathered(self) -> None:
        """Free weights that a pass has gathered from other ranks."""

    @abstractmethod
    def _kept_tensors(self) -> Iterable[Tensor]:
        """Return all tensors that training keeps between rollouts."""

    def _dropped_tensors(self) -> Iterable[Tensor]:
        """Return tensors whose contents need not be kept between rollouts."""
        return ()


def _means(replicas: Sequence[Sequence[StepGradients]]) -> dict[str, float]:
    """Return the metrics of one optimizer step, averaged over all replicas for each model."""
    means: dict[str, float] = {}
    for of_model in zip(*replicas, strict=True):
        means |= total([gradients.sums for gradients in of_model]).means()
    return means
