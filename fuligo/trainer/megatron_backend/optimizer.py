"""Megatron's AdamW: distributed or not, on the GPU or the CPU, precision-aware or not."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from fuligo.config.flag import option_name
from fuligo.errors import ConfigError
from fuligo.models.names import EMBEDDING, HEAD, Weight
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.local import local_weights
from fuligo.trainer.parameters import DTYPES, trained_names
from fuligo.trainer.ranks.settings import OptimizerSettings, TrainedParameters

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def freeze_parameters(chunks: Sequence[nn.Module], weights: Sequence[Weight], trained: TrainedParameters) -> None:
    """Switch off the gradient of all parameters that are not trained; call it before the stages are wrapped.

    Regexes are searched in the names of Hugging Face's checkpoint and in Megatron's, layers and experts counted over all ranks. Raises
    ConfigError if the lists do not fit the model, or would train a part of one of Megatron's matrices.
    """
    names = {weight.megatron: (weight.megatron, *weight.checkpoint) for weight in weights}
    names.setdefault(HEAD, names[EMBEDDING])  # where both are one, the last stage has its own copy
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
        use_distributed_optimizer=place.distributed,
        overlap_param_gather=flags.get("overlap_param_gather", False),
        optimizer_cpu_offload=place.on_cpu and settings.device == "cuda",  # without a GPU it is there already
        optimizer_offload_fraction=flags.get("optimizer_offload_fraction", 1.0),
        overlap_cpu_optimizer_d2h_h2d=place.overlap_transfers,
        pin_cpu_grads=not flags.get("no_pin_cpu_grads", False),
        pin_cpu_params=not flags.get("no_pin_cpu_params", False),
        **(_precisions(settings) if place.precision_aware else {}),
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    return optimizer


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """Return the Euclidean norm of all gradients together, over all ranks; leave them where the optimizer expects them. A collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def apply_step(optimizer: ChainedOptimizer, settings: OptimizerSettings, *, step: int, grad_norm: float) -> float:
    """Clip the gradients and update the weights; return the learning rate of the 0-based step; call it after `gradient_norm`."""
    lr = settings.schedule.at(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
        # Megatron marks groups without decay, norms and biases, and leaves it to its scheduler to say what that means.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    for part in optimizer.chained_optimizers if settings.clip_grad > 0 else ():
        parameters: list[Tensor] = [*part.get_parameters()]
        if parameters:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, settings.clip_grad, grad_norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()
    return lr


def _precisions(settings: MegatronTrainerSettings) -> dict[str, Any]:
    """Return the data types of the optimizer's state. Without a GPU only float32: only TransformerEngine's Adam has low precision."""
    flags = settings.model_flags
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    dtypes = {name: _DTYPES[flags.get(name, "fp32")] for name in names}
    if settings.device == "cpu":
        low = [option_name(name) for name, dtype in dtypes.items() if dtype != torch.float32]
        if low:
            raise ConfigError(f"{', '.join(low)}: on a CPU the optimizer's state is float32; remove it, or train on GPUs")
        return {}
    return {"use_precision_aware_optimizer": True, "store_param_remainders": flags.get("store_param_remainders", True), **dtypes}


def _require_whole(weights: Sequence[Weight], trained: TrainedParameters) -> None:
    """Check that the regexes match all or none of the weights that Megatron joins in one matrix, say queries, keys and values."""
    for pattern in (*trained.only, *trained.frozen):
        for weight in weights:
            found = [name for name in weight.checkpoint if re.search(pattern, name)]
            if found and len(found) < len(weight.checkpoint) and not re.search(pattern, weight.megatron):
                flag = "--only-train-params-name-list" if trained.only else "--freeze-params-name-list"
                raise ConfigError(
                    f"{flag}: {pattern!r} matches {found[0]} but not all of {', '.join(weight.checkpoint)}, which are one matrix in "
                    f"Megatron ({weight.megatron}) and can only be trained together"
                )
