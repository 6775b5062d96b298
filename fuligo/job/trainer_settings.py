"""Settings of the trainer, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal

from fuligo.checkpoint.location import value_weights_directory, weights_directory
from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.config.topology import engine_groups
from fuligo.engines.sglang.server import CPU_ARGUMENTS
from fuligo.errors import ConfigError, FuligoError
from fuligo.formats.checkpoint_form import prediction_prefixes
from fuligo.formats.hugging_face import read_config_json
from fuligo.formats.quantisation import EngineQuantisation
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, OptimizerSettings, TrainedParameters, TrainerSettings
from fuligo.trainer.schedule import LearningRateSchedule
from fuligo.trainer.settings import loss_settings
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings

DEFAULT_MAX_TOKENS = 8192
"""Tokens of a micro-batch if no flag limits it; the loss does not depend on it."""
Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]
_SGLANG_DTYPES: Mapping[str, Precision] = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}
"""Values of `--sglang-dtype` in which weights are sent."""


def resolve_device(config: Config) -> Device:
    """Resolve `--device`.

    Raises:
        ConfigError: `--device cuda` without a CUDA device
    """
    import torch

    asked = config.cluster.device
    if asked != "auto" and chosen_launcher(config) == "ray":
        return asked  # the nodes compute, not this machine
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; give --device cpu, or auto")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def resolve_precision(asked: Literal["auto", "fp32", "bf16"], device: Device) -> Precision:
    """Resolve `auto` to bf16 on CUDA and to fp32 on a CPU."""
    if asked == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return asked


def trainer_settings(config: Config, device: Device, *, initial_weights: Path, num_rollout: int) -> TrainerSettings:
    """Build the settings of the trainer for the backend of the configuration.

    Args:
        device: resolved device
        initial_weights: Hugging Face directory or distributed checkpoint of the initial weights
        num_rollout: rollouts of the whole run; the length of the schedule unless --lr-decay-iters gives it

    Raises:
        ConfigError: the backend does not support the model, or the quantisation of `--hf-checkpoint` accepts no new weights
    """
    common = _common_settings(config, device, initial_weights, num_rollout)
    if config.resolved_train_backend == "megatron":
        from fuligo.job.megatron_settings import megatron_settings

        return megatron_settings(config, common)
    given = {each.name: getattr(common, each.name) for each in fields(common)}
    return TorchTrainerSettings(**given, gradient_checkpointing=config.model.gradient_checkpointing)


def _common_settings(config: Config, device: Device, initial_weights: Path, num_rollout: int) -> TrainerSettings:
    assert config.model.hf_checkpoint is not None
    train, flags = config.train, config.optimizer
    num_critic_only = config.algorithm.num_critic_only_steps if config.trains_values else 0
    reference = config.initial_weights_path if config.needs_reference else None
    teacher = config.algorithm.opd_teacher_load if config.teacher_from == "trainer" else None
    engine_format = _engine_format(config)
    return TrainerSettings(
        hf_checkpoint=Path(config.model.hf_checkpoint),
        initial_weights=initial_weights,
        optimizer=_optimizer(config, flags.lr, flags.lr_warmup_iters, num_rollout=max(1, num_rollout - num_critic_only)),
        loss=loss_settings(config),
        reference_weights=weights_directory(Path(reference)) if reference is not None else None,
        teacher_weights=weights_directory(Path(teacher)) if teacher is not None else None,
        ref_update_interval=train.ref_update_interval,
        critic=_critic(config, initial_weights, num_rollout) if config.trains_values else None,
        needs_old_logprobs=config.needs_old_logprobs,
        temperature=1.0 if config.is_sft else config.rollout.rollout_temperature,
        capacity=_capacity(config, train.max_tokens_per_gpu),
        score_capacity=_capacity(config, train.log_probs_max_tokens_per_gpu or train.max_tokens_per_gpu),
        chunk_tokens=train.log_probs_chunk_size,
        balance_data=train.balance_data,
        trained=TrainedParameters(tuple(train.only_train_params_name_list), tuple(train.freeze_params_name_list)),
        device=device,
        shares_device=device == "cuda" and (config.cluster.colocate or config.resolved_rollout_backend == "embedded"),
        precision=resolve_precision(config.model.precision, device),
        sync_dtype=_sync_dtype(config, device, engine_format),
        engine_format=engine_format,
        num_ranks=config.num_train_gpus,
        seed=train.seed,
    )


def _optimizer(config: Config, lr: float, warmup_steps: int, *, num_rollout: int) -> OptimizerSettings:
    """Build the settings of one optimizer.

    Args:
        num_rollout: rollouts that train the model; the length of the schedule unless --lr-decay-iters gives it
    """
    flags = config.optimizer
    schedule = LearningRateSchedule(
        peak=lr,
        minimum=flags.min_lr,
        style=flags.lr_decay_style,
        warmup_steps=warmup_steps,
        decay_steps=flags.lr_decay_iters or num_rollout * config.resolved_num_steps_per_rollout,
    )
    betas = (flags.adam_beta1, flags.adam_beta2)
    return OptimizerSettings(schedule, betas=betas, eps=flags.adam_eps, weight_decay=flags.weight_decay, clip_grad=flags.clip_grad)


def _critic(config: Config, policy_weights: Path, num_rollout: int) -> CriticSettings:
    """Build the settings of the value model.

    Raises:
        CheckpointError: the checkpoint that the tracker of `--critic-load` names is missing or damaged
    """
    given, flags = config.checkpoint.critic_load, config.optimizer
    lr = flags.lr if flags.critic_lr is None else flags.critic_lr
    return CriticSettings(
        initial_weights=policy_weights if given is None else value_weights_directory(Path(given)),
        optimizer=_optimizer(config, lr, flags.critic_lr_warmup_iters, num_rollout=num_rollout),
        clip=config.algorithm.value_clip,
        num_only_rollouts=config.algorithm.num_critic_only_steps,
        may_begin_at_resume=given is not None,
    )


def _engine_format(config: Config) -> EngineFormat:
    """Return the form of the weights that engines load. The embedded engine runs transformers' models: no MTP layers, FP8 dequantised.

    Raises:
        ConfigError: the embedded engine does not serve `--hf-checkpoint`, or its quantisation accepts no new weights
    """
    if not config.needs_engine:
        return EngineFormat()
    assert config.model.hf_checkpoint is not None
    directory = Path(config.model.hf_checkpoint)
    if config.resolved_rollout_backend == "sglang":
        return EngineFormat(quantisation=EngineQuantisation.read(directory))
    from fuligo.engines.embedded.model import servable_config

    read_config_json(directory)  # a missing config.json is an error of its own, not one of the engine
    try:
        served = servable_config(str(directory))
    except FuligoError as error:
        fix = "--rollout-backend sglang" + (" --train-backend megatron" if config.resolved_train_backend == "torch" else "")
        raise ConfigError(f"the embedded engine does not serve --hf-checkpoint {directory}; give {fix}: {error}") from error
    return EngineFormat(left_out=prediction_prefixes(served.to_dict()))


def _sync_dtype(config: Config, device: Device, engine_format: EngineFormat) -> Precision | None:
    """Return the data type of the engines if flags set it. None means that of `--hf-checkpoint`, which they cast as they did at start."""
    if engine_format.quantisation is not None:
        return None
    if config.resolved_rollout_backend == "embedded":
        return resolve_precision(config.engine.embedded_dtype, device)
    policy = next((group for group in engine_groups(config) if group.update_weights), None)
    if policy is None:
        return None
    started_with = {**(CPU_ARGUMENTS if device == "cpu" else {}), **dict(policy.arguments.items())}
    return _SGLANG_DTYPES.get(started_with.get("dtype", "auto"))


def _capacity(config: Config, max_tokens: int | None) -> Capacity:
    """Return the capacity of a micro-batch. Token limits are per GPU, so ranks that share a sequence hold a multiple."""
    num_sharing = config.parallel.context_parallel_size if config.resolved_train_backend == "megatron" else 1
    if config.train.use_dynamic_batch_size:
        return Capacity(max_tokens=None if max_tokens is None else max_tokens * num_sharing)
    if config.train.micro_batch_size is not None:
        return Capacity(max_samples=config.train.micro_batch_size)
    return Capacity(max_tokens=DEFAULT_MAX_TOKENS * num_sharing)
