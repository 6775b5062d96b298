"""Training of one model: stages wrapped in Megatron's DistributedDataParallel, their optimizer, and its counters."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from fuligo.config.flag import option_name
from fuligo.errors import ConfigError, TrainerError
from fuligo.models.names import EMBEDDING, HEAD, Weight
from fuligo.trainer.megatron_backend.model import PolicyModel
from fuligo.trainer.megatron_backend.parts import allocate_state
from fuligo.trainer.megatron_backend.router import move_corrections
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.local import local_weights, unwrapped
from fuligo.trainer.parameters import DTYPES, trained_names
from fuligo.trainer.ranks.settings import OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress, StepGradients, losses_of_ranks, require_finite

_DTYPES = {**DTYPES, "fp16": torch.float16, "fp8": torch.uint8}


def freeze_parameters(chunks: Sequence[nn.Module], weights: Sequence[Weight], trained: TrainedParameters) -> None:
    """Disable the gradients of all parameters that are not trained. Call it before the stages are wrapped.

    Regular expressions may match names of the Hugging Face checkpoint, and names in Megatron with layers and experts counted over all
    ranks.

    Raises ConfigError if `trained` does not fit the model, or would train only a part of one of Megatron's matrices.
    """
    names = {weight.megatron: (weight.megatron, *weight.checkpoint) for weight in weights}
    names.setdefault(HEAD, names[EMBEDDING])  # if they are tied, the last stage has a copy of the embedding
    chosen = trained_names(names, trained)
    _require_whole(weights, trained)
    for name, parameter in local_weights(chunks).items():
        if isinstance(parameter, nn.Parameter):
            parameter.requires_grad_(parameter.requires_grad and name in chosen)


def build_optimizer(chunks: list[DistributedDataParallel], settings: MegatronTrainerSettings) -> ChainedOptimizer:
    """Build the optimizer over the trained parameters of the stages. A collective.

    Raises ConfigError if the requested precision needs a GPU.
    """
    flags, place, adam = settings.model_flags, settings.optimizer_place, settings.optimizer
    config = OptimizerConfig(
        optimizer="adam",
        lr=adam.schedule.peak,
        min_lr=adam.schedule.minimum,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=adam.clip_grad,
        bf16=settings.precision == "bf16",
        params_dtype=DTYPES[settings.precision],
        use_distributed_optimizer=place.use_distributed_optimizer,
        overlap_param_gather=flags.get("overlap_param_gather", False),
        optimizer_cpu_offload=place.optimizer_cpu_offload and settings.device == "cuda",  # without a GPU the state is already on the CPU
        optimizer_offload_fraction=flags.get("optimizer_offload_fraction", 1.0),
        overlap_cpu_optimizer_d2h_h2d=place.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=not flags.get("no_pin_cpu_grads", False),
        pin_cpu_params=not flags.get("no_pin_cpu_params", False),
        **(_precisions(settings) if place.use_precision_aware_optimizer else {}),
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    return optimizer


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """Prepare the gradients for the optimizer, and return their global Euclidean norm over all ranks. A collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def apply_step(optimizer: ChainedOptimizer, settings: OptimizerSettings, *, step: int, grad_norm: float) -> float:
    """Clip the gradients, update the weights, and return the learning rate of the 0-based step. Call it after `gradient_norm`."""
    lr = settings.schedule.at(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
        # Megatron marks groups without decay (norms and biases) with wd_mult 0, which its scheduler, not used here, would apply.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    for part in optimizer.chained_optimizers if settings.clip_grad > 0 else ():
        parameters: list[Tensor] = [*part.get_parameters()]
        if parameters:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, settings.clip_grad, grad_norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()
    return lr


def _precisions(settings: MegatronTrainerSettings) -> dict[str, Any]:
    """Return the arguments of `OptimizerConfig` for the data types of the optimizer's state; empty on a CPU, where they are float32.

    Raises ConfigError if low precision is requested on a CPU; it needs TransformerEngine's Adam and therefore a GPU.
    """
    flags = settings.model_flags
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    dtypes = {name: _DTYPES[flags.get(name, "fp32")] for name in names}
    if settings.device == "cpu":
        if low := [option_name(name) for name, dtype in dtypes.items() if dtype != torch.float32]:
            raise ConfigError(f"cannot use {', '.join(low)} on a CPU: the optimizer's state is float32 there; use fp32, or train on GPUs")
        return {}
    return {"use_precision_aware_optimizer": True, "store_param_remainders": flags.get("store_param_remainders", True), **dtypes}


def _require_whole(weights: Sequence[Weight], trained: TrainedParameters) -> None:
    """Check that each regex matches all or none of the weights that Megatron joins in one matrix, such as queries, keys and values.

    Raises ConfigError if not.
    """
    for pattern in (*trained.only, *trained.frozen):
        for weight in weights:
            found = [name for name in weight.checkpoint if re.search(pattern, name)]
            if found and len(found) < len(weight.checkpoint) and not re.search(pattern, weight.megatron):
                flag = "--only-train-params-name-list" if trained.only else "--freeze-params-name-list"
                raise ConfigError(
                    f"{flag}: {pattern!r} matches {found[0]} but not all of {', '.join(weight.checkpoint)}, which are one matrix in "
                    f"Megatron ({weight.megatron}) and can only be trained together; match all or none of them"
                )


class Learner:
    """Optimizer and counters of the policy or of a value model.

    Args:
        chunks: this rank's stages with initial weights, whose untrained parameters are frozen.
        flag: flag of the learning rate, for error messages.
        whose: phrase that names the model in error messages, such as `of the value model`; empty for the policy.
    """

    def __init__(
        self, chunks: Sequence[PolicyModel], settings: MegatronTrainerSettings, world: World, *, flag: str = "--lr", whose: str = ""
    ) -> None:
        self.chunks = wrap(chunks, settings)
        self.optimizer = build_optimizer(self.chunks, settings)
        self.progress = Progress()
        self._settings, self._world = settings.optimizer, world
        self._flag, self._whose = flag, whose

    def step(self, gradients: StepGradients | None, num_micro_batches: int) -> tuple[float, float]:
        """Update the weights with the gradients in the stages' buffers; return (learning rate, gradient norm). A collective.

        Raises TrainerError if a loss or the gradient is not finite; the weights are unchanged.
        """
        grad_norm = gradient_norm(self.optimizer)
        losses = losses_of_ranks(gradients, num_micro_batches, self._world)
        step = self.progress.num_optimizer_steps
        try:
            require_finite(losses, grad_norm, optimizer_step=step, flag=self._flag, whose=self._whose)
        except TrainerError:
            self.optimizer.zero_grad()
            zero_gradients(self.chunks)
            raise
        lr = apply_step(self.optimizer, self._settings, step=step, grad_norm=grad_norm)
        move_corrections(self.chunks)
        self.optimizer.zero_grad()
        self.progress.num_optimizer_steps += 1
        return lr, grad_norm

    def allocate_state(self) -> None:
        """Allocate moments that do not exist yet, before engines take the free memory; Adam would do so in its first step."""
        allocate_state(self.optimizer)

    def tensors(self) -> list[Tensor]:
        """Return the weights and buffers of the stages, and all tensors of the optimizer."""
        models = [unwrapped(chunk) for chunk in self.chunks]
        weights = [tensor.detach() for model in models for tensor in (*model.parameters(), *model.buffers())]
        groups = [parameter.detach() for group in self.optimizer.param_groups for parameter in group["params"]]
        by_parameter = [part.optimizer.state.values() for part in self.optimizer.chained_optimizers if part.optimizer is not None]
        states = [value for states in by_parameter for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*weights, *groups, *states]

    def gradient_buffers(self) -> list[Tensor]:
        """Return the tensors in which gradients are accumulated."""
        buffers: list[Any] = [buffer for chunk in self.chunks for buffer in (chunk.buffers, chunk.expert_parallel_buffers)]
        return [buffer.grad_data for part in buffers for buffer in part]


def wrap(chunks: Sequence[PolicyModel], settings: MegatronTrainerSettings) -> list[DistributedDataParallel]:
    """Wrap the stages in DistributedDataParallel, whose gradient buffers Megatron's schedules synchronize.

    Gradients are summed over the data-parallel and context-parallel ranks, not averaged, because each rank's loss is already its share of
    the step's loss.
    """
    flags = settings.model_flags
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.gradients_in_fp32,
        overlap_grad_reduce=flags.get("overlap_grad_reduce", False),
        overlap_param_gather=flags.get("overlap_param_gather", False),
        use_distributed_optimizer=settings.optimizer_place.use_distributed_optimizer,
        bucket_size=flags.get("ddp_bucket_size"),
        pad_buckets_for_high_nccl_busbw=flags.get("pad_buckets_for_high_nccl_busbw", False),
    )
    # Buckets overlap communication with the backward pass. Only a rank's first stage needs them: the communication of the others overlaps
    # with later passes in the pipeline anyway.
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
    """Finalize a step's gradients as Megatron does, but without dividing them by the number of tokens."""
    del num_tokens
    finalize_model_grads(model, None, **options)


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights on every rank, which `--overlap-param-gather` defers to the next forward pass."""
    for chunk in chunks:
        if chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)


def zero_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
