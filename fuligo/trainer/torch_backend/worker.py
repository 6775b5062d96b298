"""Rank worker of the torch trainer."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from fuligo.errors import TrainerError
from fuligo.formats.quantized_base import QuantizedBase
from fuligo.models.adapter import SharedBase, adapter_off, set_dropout
from fuligo.models.mtp import mtp_module, stored_mtp
from fuligo.models.quantized_linear import quantized_weights
from fuligo.models.registry import VISION_TYPES
from fuligo.models.transformers_types import freeze_towers, read_config, text_config
from fuligo.models.vision.processor import ImageProcessor
from fuligo.trainer.adapter_sender import AdapterSender, base_digest
from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.mtp import MTPTraining, later_tokens
from fuligo.trainer.packing import Cost, sequence_flops
from fuligo.trainer.parameters import require_trained_mtp, sync_dtype
from fuligo.trainer.precision_noise import Unmeasured
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.worker import RankWorker
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients
from fuligo.trainer.torch_backend.compiled_layers import can_compile
from fuligo.trainer.torch_backend.critic import Critic, ValueModel, load_value_model
from fuligo.trainer.torch_backend.learner import Learner, compute_gradients, compute_scores, freeze_parameters
from fuligo.trainer.torch_backend.lora import AdaptedModel, add_policy_adapter, store_base_in_half_precision
from fuligo.trainer.torch_backend.model import (
    PackedModel,
    Policy,
    check_packed_forward,
    enable_gradient_checkpointing,
    load_model,
    unscored_sample,
)
from fuligo.trainer.torch_backend.precision_noise import precision_noise
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.state import TrainingState, copy_state, restore_state, save_state
from fuligo.trainer.torch_backend.weights import checkpoint_dtype, copy_weights, named_weights, shard, weight_tensors
from fuligo.types import FloatArray, TrainSample

MAX_ROW_TOKENS = 8192
"""Maximum length in tokens of a made-up row. `warm_up` tunes kernels for its size, so a short row gives slow ones."""
SAMPLE_TOKENS = 512
"""Maximum length of a made-up sample in tokens."""

PackedT = TypeVar("PackedT", bound=PackedModel)


class TorchRankWorker(RankWorker[TorchTrainerSettings, Critic, Policy]):
    """Worker with the models, optimizers and counters of one rank; models are sharded with FSDP2 on several ranks or in bf16."""

    def __init__(self, settings: TorchTrainerSettings, world: World, *, base: SharedBase | None = None) -> None:
        """Load weights and build the optimizers. Raises a FuligoError if the weights, the model or the flags cannot be used.

        Args:
            base: base weights that the policies of several runs in this process share, each with a separate adapter; single rank only.
        """
        super().__init__(settings, world)
        torch.manual_seed(settings.seed + world.rank)
        self._base_digest: str | None = None
        self._shared_base = base
        checkpoint = read_config(settings.hf_checkpoint)
        self.export_dtype = sync_dtype(settings, checkpoint_dtype(checkpoint))
        self._images = ImageProcessor(settings.hf_checkpoint) if checkpoint.model_type in VISION_TYPES and settings.takes_images else None
        self.policy = self._load(settings.initial_weights, trained=True, is_exact=settings.exact_on_policy)
        reference = settings.reference_weights if settings.lora is None else None
        self.reference = None if reference is None else self._load(reference, trained=False, is_exact=settings.exact_on_policy)
        self.teacher = None if settings.teacher_weights is None else self._load(settings.teacher_weights, trained=False)
        self.critic = None
        if settings.critic is not None:
            value_model = ValueModel(load_value_model(settings.critic.initial_weights, self.policy.model), self._images)
            self.critic = Critic(self._placed(value_model, trained=True), settings.critic, world)
        self._learner = Learner(self.policy.model, settings.optimizer, world)
        keeps_mtp = world.rank == 0 and settings.lora is None and not settings.has_mtp
        self._carried = stored_mtp(settings.initial_weights, settings.hf_checkpoint) if keeps_mtp else {}
        self.balance_by = _cost(self.policy) if settings.balance_data else None
        self._writer: ComputeThread | None = None
        self._adapter_sender = None
        if settings.lora is not None:
            adapted = AdaptedModel(self.policy.model, self.export_dtype)
            named = settings.lora.adapter if settings.lora.is_named else None
            self._adapter_sender = AdapterSender(adapted, self._sender, world, merges=settings.lora.is_merged, named=named)

    def warm_up(self) -> None:
        max_tokens = self.settings.capacity.max_tokens
        if not self.policy.is_compiled or max_tokens is None:  # without a limit, made-up rows may need more memory than the run's
            return
        num_tokens = min(max_tokens, self.settings.max_step_tokens or max_tokens, MAX_ROW_TOKENS)
        try:
            self._rehearse(num_tokens)
        except torch.OutOfMemoryError as error:
            raise TrainerError(
                f"cannot train on rows of {num_tokens:,} tokens: {error}; lower --max-tokens-per-gpu (with --use-dynamic-batch-size), or "
                "use --gradient-checkpointing"
            ) from error

    def precision_noise(self, samples: list[TrainSample]) -> float | Unmeasured | None:
        with self._timeline.span("precision noise"):
            return precision_noise(self.policy, samples, self.world, per_token=self.settings.loss.per_token)

    def gradients(self, step: StepShare) -> StepGradients:
        with self._dropout_on():
            return compute_gradients(self.policy, step, settings=self.settings.loss, device=self.world.device, mtp=self.settings.mtp)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.settings.lora is not None:
            return AdaptedModel(self.policy.model, self.export_dtype).merged()
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

    def close(self) -> None:
        if self._adapter_sender is not None:
            self._adapter_sender.close()

    def _load(self, directory: Path, *, trained: bool, is_exact: bool = False) -> Policy:
        settings = self.settings
        model = load_model(directory, has_mtp=trained and settings.has_mtp)
        policy = Policy(model, temperature=settings.temperature, chunk_tokens=settings.chunk_tokens, images=self._images)
        if is_exact:
            policy.make_batch_invariant(self.world.device.type, ranks=settings.engine_tp_size)
        if self.world.rank == 0:
            check_packed_forward(policy, shares_prefixes=settings.shares_prefixes)
        if trained and settings.lora is not None:
            base = self._quantized_base()
            self._base_digest = base_digest(weight_tensors(model).items())
            add_policy_adapter(model, settings.lora, seed=settings.seed, base=base, device=self.world.device)
            if settings.precision == "bf16":
                store_base_in_half_precision(model)
            if self._shared_base is not None:
                self._shared_base.give_to(model, digest=self._base_digest)
        elif trained:
            layer = mtp_module(model)
            if settings.mtp is None and layer is not None:
                layer.requires_grad_(False)
            freeze_parameters(model, settings.trained)
            if settings.mtp is not None and layer is not None and not settings.mtp.is_joint:
                require_trained_mtp(layer.parameters(), settings.trained)
        else:
            model.requires_grad_(False)
        policy = self._placed(policy, trained=trained)
        set_dropout(model, on=False)
        return policy

    def _quantized_base(self) -> QuantizedBase | None:
        """Return the storage of the policy's base weights; None if they are not quantized."""
        lora = self.settings.lora
        if lora is None or lora.base_precision is None:
            return None
        return QuantizedBase(lora.base_precision, str(self.export_dtype).removeprefix("torch."))

    def _placed(self, model: PackedT, *, trained: bool) -> PackedT:
        """Move the model to the device; shard it if there are several ranks or computation is in half precision."""
        if self._images is None:
            freeze_towers(model.model)  # without images they would have neither gradients nor optimizer state
        if trained and self.settings.gradient_checkpointing:
            enable_gradient_checkpointing(model.model)
        half_precision = self.settings.precision == "bf16"
        if self.settings.compiles_dense_layers and can_compile(model.model):
            model.compile_layers()
        if half_precision or self.world.size > 1:
            # Sharding copies parameters, so exclude those that other runs use too.
            whole = set() if self._shared_base is None else self._shared_base.parameters()
            shard(model, model.layers, self.world, half_precision=half_precision, whole=whole)
            if isinstance(model, Policy):
                register_fsdp_forward_method(model, Policy.with_mtp.__name__)
        if model.vision is not None:
            model.vision.runs_always = self.world.size > 1
            model.vision.is_frozen = not any(parameter.requires_grad for parameter in model.vision.base.visual.parameters())
        return model.to(self.world.device)

    def _rehearse(self, num_tokens: int) -> None:
        """Run each kind of pass of a step once for each kind of row, of at most `num_tokens`."""
        device = self.world.device
        # Rows whose samples happen to share nothing have no tree, and are compiled separately.
        for shares_prefixes in (True, False) if self.settings.shares_prefixes else (False,):
            row = made_up_row(self.policy, num_tokens, device, shares_prefixes=shares_prefixes)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                self._rehearse_training(row)
                self._rehearse_scoring(row)

    def _rehearse_training(self, row: PackedTokens) -> None:
        settings = self.settings
        with self._dropout_on():
            policy_loss(self.policy, row, uses_entropy=settings.loss.entropy_coef != 0, mtp=settings.mtp).backward()
        self.policy.zero_grad()
        if self.critic is not None:
            self.critic.value_model(row).mean().backward()
            self.critic.value_model.zero_grad()

    @torch.no_grad()
    def _rehearse_scoring(self, row: PackedTokens) -> None:
        """Run the passes without gradients; they and frozen models are compiled separately."""
        settings = self.settings
        value_model = None if self.critic is None else self.critic.value_model
        for model in (self.policy if settings.needs_old_logprobs else None, self.reference, self.teacher, value_model):
            if model is not None and model.is_compiled:
                model(row)
                model.release_gathered()
        if settings.lora is not None and settings.reference_weights is not None:
            with self._adapter_off():
                self.policy(row)
            self.policy.release_gathered()

    @contextmanager
    def _dropout_on(self) -> Iterator[None]:
        set_dropout(self.policy.model, on=True)
        try:
            yield
        finally:
            set_dropout(self.policy.model, on=False)

    def _policy_logprobs(self, share: ScoreShare) -> dict[int, FloatArray]:
        return self._logprobs_of(self.policy, share)

    def _logprobs_of(self, model: Policy, share: ScoreShare) -> dict[int, FloatArray]:
        return compute_scores(model, share, self.world.device, lambda outputs: outputs.logprobs)

    def _adapter_off(self) -> AbstractContextManager[None]:
        return adapter_off(self.policy.model)

    def _update_reference(self, reference: Policy) -> None:
        copy_weights(self.policy.model, reference.model)

    def _state(self) -> TrainingState:
        reference = self._changed_reference
        model = None if reference is None else reference.model
        return TrainingState(self._learner, model, self.critic, self._base_digest, self._quantized_base(), self._carried)

    def _models(self) -> list[PackedModel]:
        value_model = None if self.critic is None else self.critic.value_model
        return [model for model in (self.policy, self.reference, self.teacher, value_model) if model is not None]

    def _release_gathered(self) -> None:
        for model in self._models():
            model.release_gathered()

    def _kept_tensors(self) -> Iterator[Tensor]:
        for model in self._models():
            yield from model.parameters()
            yield from model.buffers()
        for learner in self._learners():
            yield from learner.tensors()


def _cost(policy: Policy) -> Cost:
    """Return the cost function of a sequence in forward FLOPs: 2 per weight and token, 4 per hidden unit, layer and pair of tokens."""
    config = text_config(policy.model.config)
    num_weights = sum(parameter.numel() for parameter in policy.model.parameters())
    num_weights += sum(layer.num_elements for layer in quantized_weights(policy.model).values())
    return sequence_flops(linear=2.0 * num_weights, attention=4.0 * config.hidden_size * config.num_hidden_layers)


def made_up_row(policy: Policy, max_tokens: int, device: torch.device, *, shares_prefixes: bool) -> PackedTokens:
    """Return a row of at least two random samples with the same prompt, packed as in training.

    It does not exceed `max_tokens`, the length of the longest row of the run, nor do samples exceed the model's positions. With
    `shares_prefixes`, the prompt is stored only once.
    """
    config = text_config(policy.model.config)
    row_tokens = min(max_tokens, MAX_ROW_TOKENS)
    num_tokens = max(2, min(SAMPLE_TOKENS, row_tokens // 2, getattr(config, "max_position_embeddings", SAMPLE_TOKENS)))
    num_samples, num_prompt = max(2, row_tokens // num_tokens), max(1, num_tokens // 8)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=(num_samples, num_tokens), dtype=np.int32)
    ids[:, :num_prompt] = ids[0, :num_prompt]
    shared = [0, *[num_prompt] * (num_samples - 1)] if shares_prefixes else []
    return pack_tokens([unscored_sample(of_sample, num_prompt) for of_sample in ids], device, shared=shared)


def policy_loss(policy: Policy, row: PackedTokens, *, uses_entropy: bool, mtp: MTPTraining | None) -> Tensor:
    """Return a loss with the backward pass of a training step, including that of entropies and MTP layer if the step trains on them."""
    if mtp is None:
        outputs, further = policy(row), None
    else:
        outputs, further = policy.with_mtp(row, later_tokens(row, 1), is_joint=mtp.is_joint)
    loss = outputs.logprobs.mean() if further is None else outputs.logprobs.mean() + further.mean()
    return loss + outputs.entropy.mean() if uses_entropy else loss
