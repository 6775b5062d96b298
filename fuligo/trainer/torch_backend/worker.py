"""Rank worker of the torch trainer: the same calls on all ranks, in the same order, each with its own samples."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fuligo.formats.quantised_base import QuantisedBase
from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.models.adapter import adapter_off, set_dropout
from fuligo.models.quantised_linear import quantised_weights
from fuligo.models.shared_base import SharedBase
from fuligo.models.transformers_types import read_config, sees_images, text_config
from fuligo.models.vision.processor import ImageProcessor
from fuligo.trainer.adapter_sender import AdapterSender, base_digest
from fuligo.trainer.batch import pack_tokens
from fuligo.trainer.host_memory import HostMemory
from fuligo.trainer.metric_sums import mean_of_steps
from fuligo.trainer.packing import Cost, sequence_flops
from fuligo.trainer.parameters import sync_dtype
from fuligo.trainer.profiling import profiled
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import SampleScores, ScoreShare, StepShare, join_by_position
from fuligo.trainer.step import Progress, StepGradients
from fuligo.trainer.timeline import Timeline
from fuligo.trainer.torch_backend.compiled_layers import can_compile
from fuligo.trainer.torch_backend.critic import Critic, ValueModel, load_value_model
from fuligo.trainer.torch_backend.learner import Learner, compute_gradients, freeze_parameters
from fuligo.trainer.torch_backend.lora import AdaptedModel, MergedWeights, add_policy_adapter, store_base_in_half_precision
from fuligo.trainer.torch_backend.model import (
    PackedModel,
    Policy,
    check_packed_forward,
    enable_gradient_checkpointing,
    load_model,
)
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.state import TrainingState, copy_state, restore_state, save_state
from fuligo.trainer.torch_backend.weights import checkpoint_dtype, copy_weights, named_weights, shard, weight_tensors
from fuligo.types import FloatArray, StepResult, TokenScores
from fuligo.weights.colocated import TrainerRanks
from fuligo.weights.senders import WeightSender

logger = logging.getLogger(__name__)

PackedT = TypeVar("PackedT", bound=PackedModel)


class TorchRankWorker:
    """Models, optimizers and counters of one rank, or its shards of them."""

    def __init__(self, settings: TorchTrainerSettings, world: World, *, base: SharedBase | None = None) -> None:
        """Load weights and build the optimizers.

        Args:
            base: base weights to share with the policies of other runs in this process, on a single rank; each has its own adapter

        Raises:
            CheckpointError: weights cannot be read.
            TrainerError: the model cannot run packed.
            ConfigError: the lists of trained parameters do not fit the model.
        """
        self.settings = settings
        self.world = world
        torch.manual_seed(settings.seed + world.rank)
        self._base_digest: str | None = None
        self._shared_base = base
        checkpoint = read_config(settings.hf_checkpoint)
        self.export_dtype = sync_dtype(settings, checkpoint_dtype(checkpoint))
        self._images = ImageProcessor(settings.hf_checkpoint) if sees_images(checkpoint) else None
        self.policy = self._load(settings.initial_weights, trained=True, is_exact=settings.exact_on_policy)
        reference = settings.reference_weights if settings.lora is None else None
        self.reference = None if reference is None else self._load(reference, trained=False, is_exact=settings.exact_on_policy)
        self.teacher = None if settings.teacher_weights is None else self._load(settings.teacher_weights, trained=False)
        self.critic = None
        if settings.critic is not None:
            value_model = ValueModel(load_value_model(settings.critic.initial_weights, self.policy.model), self._images)
            self.critic = Critic(self._placed(value_model, trained=True), settings.critic, world)
        self._learner = Learner(self.policy.model, settings.optimizer, world)
        self.balance_by = _cost(self.policy) if settings.balance_data else None
        self._writer: ComputeThread | None = None
        self._sender = WeightSender(settings.engine_format, TrainerRanks(world.rank, world.objects))
        self._adapter_sender = None
        if settings.lora is not None:
            adapted = AdaptedModel(self.policy.model, self.export_dtype)
            named = settings.lora.adapter if settings.lora.is_named else None
            self._adapter_sender = AdapterSender(adapted, self._sender, world, merges=settings.lora.is_merged, named=named)
        self._timeline = Timeline(world.device)
        self._host_memory = HostMemory(world.device)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._learner.optimizer

    @property
    def progress(self) -> Progress:
        return self._learner.progress

    def score(self, share: ScoreShare) -> list[SampleScores] | None:
        """Return old, reference and teacher log-probabilities and values of all ranks' samples, on rank 0; None on others."""
        with self._timeline.span("score"):
            olds = self._logprobs(self.policy, share) if self.settings.needs_old_logprobs else {}
            refs = self._reference_logprobs(share)
            teachers = self._logprobs(self.teacher, share) if self.teacher is not None else {}
            values = self._scores(self.critic.value_model, share) if self.critic is not None else {}
        own = {i: SampleScores(olds.get(i), refs.get(i), teachers.get(i), values.get(i)) for i in share.positions}
        gathered = self.world.gather(own)
        return None if gathered is None else join_by_position(gathered)

    def logprobs(self, share: ScoreShare) -> list[FloatArray] | None:
        """Return log-probabilities of the current policy for all ranks' samples, on rank 0; None on others."""
        gathered = self.world.gather(self._logprobs(self.policy, share))
        return None if gathered is None else join_by_position(gathered)

    def train(self, steps: Sequence[StepShare | None]) -> StepResult:
        """Run the optimizer steps of a rollout.

        Raises:
            TrainerError: a loss or a gradient is not finite; the weights are as they were before that optimizer step.
        """
        started = time.perf_counter()
        metrics: list[dict[str, float]] = []
        scores: dict[int, TokenScores] = {}
        num_tokens = num_shared = 0
        with profiled(self.settings.profile, rollout=self.progress.num_rollouts, rank=self.world.rank, device=self.world.device):
            for step in steps:
                if step is None:  # skipped, but the learning-rate schedule counts it
                    self.progress.num_optimizer_steps += 1
                    continue
                gradients, step_metrics = self._optimizer_steps(step)
                metrics.append(step_metrics)
                scores |= gradients.scores
                num_tokens += gradients.num_tokens
                num_shared += gradients.num_shared_tokens
        self.progress.num_rollouts += 1
        if self.critic is not None:
            self.critic.end_rollout()
        self._maybe_renew_reference()
        if self.settings.shares_device:
            torch.cuda.empty_cache()  # the engine uses the activations' memory until the next rollout
        gathered = self.world.gather((scores, num_tokens, num_shared, self._timeline.take())) or []
        num_tokens = sum(tokens for _, tokens, _, _ in gathered)
        means = {f"train/{name}": value for name, value in mean_of_steps(metrics).items()}
        means["train/tokens_per_s"] = num_tokens / (time.perf_counter() - started)
        if self.settings.shares_prefixes:
            means["train/shared_prefix_share"] = sum(shared for _, _, shared, _ in gathered) / max(1, num_tokens)
        by_position = {position: score for rank_scores, *_ in gathered for position, score in rank_scores.items()}
        return StepResult(means, by_position, num_tokens, rank_spans=[spans for *_, spans in gathered])

    def gradients(self, step: StepShare) -> StepGradients:
        """Compute the gradient of the step's loss into the parameters."""
        if self.settings.lora is None:
            return compute_gradients(self.policy, step, settings=self.settings.loss, device=self.world.device)
        set_dropout(self.policy.model, on=True)
        try:
            return compute_gradients(self.policy, step, settings=self.settings.loss, device=self.world.device)
        finally:
            set_dropout(self.policy.model, on=False)

    def send_weights(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Gather on all ranks; rank 0 sends, and so does any rank with an engine on its GPU."""
        with self._timeline.span("send"):
            if self._adapter_sender is not None:
                return self._adapter_sender.send(target)
            return self._sender.send(self.named_weights(), target)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors in the data type of `hf_checkpoint`, an adapter merged into them.

        A collective: every rank iterates to the end.
        """
        if self.settings.lora is not None:
            return MergedWeights(self.policy.model, self.export_dtype).named()
        return named_weights(self.policy.model, dtype=self.export_dtype)

    def save(self, directory: Path) -> None:
        save_state(directory, self._state(), model_files=self.settings.hf_checkpoint, world=self.world)

    def begin_save(self, directory: Path) -> Future[None]:
        write = copy_state(directory, self._state(), model_files=self.settings.hf_checkpoint, world=self.world)
        if self._writer is None:
            self._writer = ComputeThread("checkpoint writer")
        return self._writer.submit(write)

    def restore(self, directory: Path) -> None:
        restore_state(directory, self._state(), self.world)

    def offload(self) -> None:
        """Free the device's memory of everything that training keeps between rollouts."""
        with self._timeline.span("offload"):
            self._host_memory.take(self._on_device())
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()

    def onload(self) -> None:
        with self._timeline.span("onload"):
            self._host_memory.give_back()

    def close(self) -> None:
        """Do nothing: FSDP's only group is the default one."""

    def _load(self, directory: Path, *, trained: bool, is_exact: bool = False) -> Policy:
        settings = self.settings
        model = load_model(directory)
        policy = Policy(model, temperature=settings.temperature, chunk_tokens=settings.chunk_tokens, images=self._images)
        if is_exact:
            policy.make_batch_invariant(self.world.device.type)
        if self.world.rank == 0:
            check_packed_forward(policy, shares_prefixes=settings.shares_prefixes)
        if trained and settings.lora is not None:
            base = self._quantised_base()
            self._base_digest = base_digest(weight_tensors(model).items())
            add_policy_adapter(model, settings.lora, seed=settings.seed, base=base, device=self.world.device)
            if settings.precision == "bf16":
                store_base_in_half_precision(model)
            if self._shared_base is not None:
                self._shared_base.give_to(model, digest=self._base_digest)
        elif trained:
            freeze_parameters(model, settings.trained)
        else:
            model.requires_grad_(False)
        policy = self._placed(policy, trained=trained)
        set_dropout(model, on=False)
        return policy

    def _quantised_base(self) -> QuantisedBase | None:
        """Return the storage of the policy's base; None if it is not quantized."""
        lora = self.settings.lora
        if lora is None or lora.base_precision is None:
            return None
        return QuantisedBase(lora.base_precision, str(self.export_dtype).removeprefix("torch."))

    def _placed(self, model: PackedT, *, trained: bool) -> PackedT:
        """Move the model to the device, sharded if there are several ranks or computation is in half precision."""
        if trained and self.settings.gradient_checkpointing:
            enable_gradient_checkpointing(model.model)
        half_precision = self.settings.precision == "bf16"
        if self.settings.compiles_dense_layers and can_compile(model.model):
            model.compile_layers()
        if half_precision or self.world.size > 1:
            # Sharding copies parameters; those that other runs also use stay as they are.
            whole = set() if self._shared_base is None else self._shared_base.parameters()
            shard(model, model.layers, self.world, half_precision=half_precision, whole=whole)
        if model.vision is not None:
            model.vision.runs_always = self.world.size > 1
            model.vision.is_frozen = not any(parameter.requires_grad for parameter in model.vision.base.visual.parameters())
        return model.to(self.world.device)

    def _reference_logprobs(self, share: ScoreShare) -> dict[int, FloatArray]:
        """Compute the reference's log-probabilities; with LoRA it is the policy without its adapter."""
        if self.reference is not None:
            return self._logprobs(self.reference, share)
        if self.settings.lora is None or self.settings.reference_weights is None:
            return {}
        with adapter_off(self.policy.model):
            return self._logprobs(self.policy, share)

    def _logprobs(self, policy: Policy, share: ScoreShare) -> dict[int, FloatArray]:
        return self._scores(policy, share, lambda outputs: outputs.logprobs)

    @torch.no_grad()
    def _scores(
        self, model: PackedModel, share: ScoreShare, of: Callable[[Any], Tensor] = lambda outputs: outputs
    ) -> dict[int, FloatArray]:
        """Return one number, by `of` from the model's outputs, for each response token of this rank's samples, by position among all."""
        found: dict[int, FloatArray] = {}
        for plan in share.schedule.plans:
            tokens = pack_tokens([share.samples[i] for i in plan.samples], self.world.device, shared=plan.shared)
            columns = of(model(tokens)).cpu().split(tokens.response_lengths)
            found |= {share.positions[i]: column.numpy() for i, column in zip(plan.samples, columns, strict=True)}
        model.release_gathered()
        return found

    def _optimizer_steps(self, step: StepShare) -> tuple[StepGradients, dict[str, float]]:
        """Step the value model, then the policy; return the policy's gradients and scores if it learns, else the value model's."""
        metrics: dict[str, float] = {}
        if self.critic is not None:
            with self._timeline.span("forward, backward"):
                gradients = self.critic.gradients(step)
            with self._timeline.span("optimizer"):
                metrics = self.critic.step(gradients)
            if self.critic.learns_alone:
                return gradients, metrics
        with self._timeline.span("forward, backward"):
            gradients = self.gradients(step)
        with self._timeline.span("optimizer"):
            metrics |= self._learner.step(gradients)
        return gradients, {**metrics, "num_micro_batches": float(len(gradients.losses))}

    def _maybe_renew_reference(self) -> None:
        interval = self.settings.ref_update_interval
        if self.reference is not None and interval is not None and self.progress.num_rollouts % interval == 0:
            copy_weights(self.policy.model, self.reference.model)

    def _state(self) -> TrainingState:
        changes = self.reference is not None and self.settings.ref_update_interval is not None
        reference = self.reference.model if self.reference is not None and changes else None
        return TrainingState(self._learner, reference, self.critic, self._base_digest, self._quantised_base())

    def _on_device(self) -> Iterator[Tensor]:
        """Return all tensors that training keeps between rollouts."""
        value_model = None if self.critic is None else self.critic.value_model
        for model in (self.policy, self.reference, self.teacher, value_model):
            if model is not None:
                model.release_gathered()
                yield from model.parameters()
                yield from model.buffers()
        yield from self._learner.tensors()
        if self.critic is not None:
            yield from self.critic.learner.tensors()


def _cost(policy: Policy) -> Cost:
    """Return the FLOPs of the forward pass: two for each weight and token, four for each hidden unit, layer and pair of tokens."""
    config = text_config(policy.model.config)
    num_weights = sum(parameter.numel() for parameter in policy.model.parameters())
    num_weights += sum(layer.num_elements for layer in quantised_weights(policy.model).values())
    return sequence_flops(linear=2.0 * num_weights, attention=4.0 * config.hidden_size * config.num_hidden_layers)
