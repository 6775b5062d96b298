"""Learner: stages wrapped in Megatron's DistributedDataParallel, their optimizer, and step counters."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor, nn

from fuligo.errors import TrainerError
from fuligo.trainer.megatron_backend.model import PolicyModel
from fuligo.trainer.megatron_backend.optimizer import apply_step, build_optimizer, gradient_norm
from fuligo.trainer.megatron_backend.router import move_corrections
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress, StepGradients, require_finite


class Learner:
    """Learner of the policy or of a value model.

    Args:
        chunks: this rank's stages with their initial weights, and with their untrained parameters frozen.
        whose: owner for error messages if there is more than one model: `of the value model`.
    """

    def __init__(
        self, chunks: Sequence[PolicyModel], settings: MegatronTrainerSettings, world: World, *, flag: str = "--lr", whose: str = ""
    ) -> None:
        self.chunks = wrap(chunks, settings)
        self.optimizer = build_optimizer(self.chunks, settings)
        self.progress = Progress()
        self._settings, self._world = settings, world
        self._flag, self._whose = flag, whose

    def step(self, gradients: StepGradients | None, num_micro_batches: int) -> tuple[float, float]:
        """Update the weights by the gradients in the stages' buffers; return (learning rate, gradient norm). A collective.

        Raises:
            TrainerError: a loss or the gradient is not finite; the weights are unchanged.
        """
        grad_norm = gradient_norm(self.optimizer)
        self._check_finite(gradients, num_micro_batches, grad_norm)
        lr = apply_step(self.optimizer, self._settings.optimizer, step=self.progress.num_optimizer_steps, grad_norm=grad_norm)
        move_corrections(self.chunks)
        self.optimizer.zero_grad()
        self.progress.num_optimizer_steps += 1
        return lr, grad_norm

    def _check_finite(self, gradients: StepGradients | None, num_micro_batches: int, grad_norm: float) -> None:
        """Check the losses of all ranks and the norm of the whole gradient, so that all ranks decide the same."""
        losses = torch.zeros(self._world.size, num_micro_batches, device=self._world.device)
        if gradients is not None:
            losses[self._world.rank] = gradients.losses
        number = self.progress.num_optimizer_steps
        try:
            require_finite(self._world.sum(losses), grad_norm, optimizer_step=number, flag=self._flag, whose=self._whose)
        except TrainerError:
            self.optimizer.zero_grad()
            zero_gradients(self.chunks)
            raise


def wrap(chunks: Sequence[PolicyModel], settings: MegatronTrainerSettings) -> list[DistributedDataParallel]:
    """Wrap the stages with buffers for the gradients of trained weights, which Megatron's schedules then synchronize.

    Gradients are summed over the data-parallel and context-parallel ranks, never averaged: the loss is a share of the whole step's.
    """
    flags = settings.model_flags
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.gradients_in_fp32,
        overlap_grad_reduce=flags.get("overlap_grad_reduce", False),
        overlap_param_gather=flags.get("overlap_param_gather", False),
        use_distributed_optimizer=settings.optimizer_place.distributed,
        bucket_size=flags.get("ddp_bucket_size"),
        pad_buckets_for_high_nccl_busbw=flags.get("pad_buckets_for_high_nccl_busbw", False),
    )
    # Buckets hide communication behind the backward pass; only the first stage needs that, the others wait in the pipeline.
    wrapped = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.config.finalize_model_grads_func = _finalize
        chunk.config.moe_router_enable_expert_bias = False  # `_finalize` would move the bias too early; see `move_corrections`
        if ddp_config.overlap_grad_reduce:
            each: Any = [other.no_sync for other in wrapped]  # a list for interleaved stages, despite the annotation
            chunk.config.no_sync_func = each if len(wrapped) > 1 else chunk.no_sync
    return wrapped


def _finalize(model: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Finish a step's backward passes as Megatron does, without its division by the number of tokens."""
    del num_tokens
    finalize_model_grads(model, None, **options)


def wait_for(chunk: DistributedDataParallel, weight: Tensor) -> None:
    """Wait until all of a weight is gathered; its own module's forward pass does so, but this weight is used outside it."""
    if chunk.use_forward_hook and weight in chunk.param_to_bucket_group:
        chunk.param_to_bucket_group[weight].finish_param_sync()


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Complete the weights on every rank after a step that leaves it to the next forward pass (`--overlap-param-gather`)."""
    for chunk in chunks:
        if chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)


def zero_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
