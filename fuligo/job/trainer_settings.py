"""Settings of the trainer, from the configuration."""

import math
from dataclasses import fields, replace
from pathlib import Path

from fuligo.checkpoint.location import value_weights_directory, weights_directory
from fuligo.config import Config
from fuligo.config.topology import policy_tp_size
from fuligo.engines.backend import engine_backend
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import TOWER_MODULES, adapter_directory
from fuligo.formats.hugging_face import read_config_json
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.layout.megatron import layout_of
from fuligo.models.adapter_names import AdapterNames, adapter_of
from fuligo.models.device import Device, resolve_precision
from fuligo.models.registry import architecture_of, batch_variant_because, names_of, unshareable_because
from fuligo.models.routing import RoutingShape
from fuligo.models.stated_flags import stated_flags
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, SparseLayers
from fuligo.trainer.mtp import MTPTraining
from fuligo.trainer.packing import Capacity
from fuligo.trainer.profiling import ProfileSettings
from fuligo.trainer.ranks.settings import (
    CriticSettings,
    LearningRateSchedule,
    LoraSettings,
    OptimizerSettings,
    TrainedParameters,
    TrainerSettings,
)
from fuligo.trainer.settings import loss_settings
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings

DEFAULT_MAX_TOKENS = 8192
"""Maximum tokens per micro-batch and GPU if no flag sets a limit; the loss does not depend on it."""


def trainer_settings(
    config: Config, device: Device, *, initial_weights: Path, num_rollout: int, profile_dir: Path = Path("profile")
) -> TrainerSettings:
    """Build the settings of the trainer for the backend of the configuration.

    `initial_weights` are a Hugging Face directory or distributed checkpoint; `num_rollout`, the rollouts of the whole run, determines the
    length of the schedule unless --lr-decay-iters gives it. Raises ConfigError if the model, the device or the engine does not support a
    flag, and CheckpointError if `--lora-adapter` cannot be read.
    """
    common = _common_settings(config, device, initial_weights, num_rollout)
    if config.observability.profile:
        chosen = ProfileSettings(tuple(config.observability.profile), tuple(config.observability.profile_ranks), profile_dir.absolute())
        common = replace(common, profile=chosen)
    return {"torch": torch_settings, "megatron": megatron_settings}[config.resolved_train_backend](config, common)


def torch_settings(config: Config, common: TrainerSettings) -> TorchTrainerSettings:
    """Complete the common settings with those of the torch trainer."""
    longest, train = config.max_sample_tokens, config.train
    return TorchTrainerSettings(
        **{each.name: getattr(common, each.name) for each in fields(common)},
        gradient_checkpointing=config.model.gradient_checkpointing,
        torch_compile=config.model.torch_compile is not False and not config.train.exact_on_policy,  # compiled layers round differently
        exact_on_policy=_is_exact(config, common.device, common.hf_checkpoint),
        engine_tp_size=policy_tp_size(config),
        takes_images=bool(config.data.multimodal_keys),
        has_mtp=bool(config.train.mtp_num_layers),
        mtp=MTPTraining(train.mtp_loss_scaling_factor, train.mtp_joint_training) if train.enable_mtp_training else None,
        max_step_tokens=None if longest is None else longest * math.ceil(config.resolved_global_batch_size / common.num_replicas),
    )


def _is_exact(config: Config, device: Device, checkpoint: Path) -> bool:
    """Return whether the torch trainer computes the engine's log-probabilities bit for bit (--exact-on-policy).

    Raises ConfigError if the flag is set, but the engine or the model does not support it on the device.
    """
    if not config.train.exact_on_policy:
        return False
    if config.needs_engine and device != config.engine_capabilities.exact_on:
        backend, there = config.resolved_rollout_backend, config.engine_capabilities.exact_on
        raise ConfigError(f"cannot use --exact-on-policy with the engine {backend} on {device}; use --device {there}")
    if (because := batch_variant_because(read_config_json(checkpoint), device)) is not None:
        raise ConfigError(f"cannot use --exact-on-policy for {checkpoint}: {because}; drop the flag")
    return True


def _shares_prefixes(config: Config, checkpoint: Path, teacher: Path | None) -> bool:
    """Return whether the trainer computes shared prefixes once, in the teacher's passes too.

    Raises ConfigError with `--share-prefixes on` if the layers of the policy or the teacher do not support it.
    """
    if not config.shares_prefixes:
        return False
    for whose, directory in (("", checkpoint), ("the teacher ", teacher)):
        if directory is None:
            continue
        config_json = read_config_json(directory)
        because = unshareable_because(config_json)
        if because is not None and config.train.share_prefixes == "auto":
            return False
        if because is not None:
            raise ConfigError(f"cannot use --share-prefixes on for {whose}{config_json.get('model_type')}: {because}; drop the flag")
    return True


def _common_settings(config: Config, device: Device, initial_weights: Path, num_rollout: int) -> TrainerSettings:
    train, flags = config.train, config.optimizer
    num_critic_only = config.algorithm.num_critic_only_steps if config.trains_values else 0
    reference = config.initial_weights_path if config.needs_reference else None
    load = config.algorithm.opd_teacher_load if config.teacher_from == "trainer" else None
    teacher = weights_directory(Path(load)) if load is not None else None
    frozen = (*train.freeze_params_name_list, *([f"^{TOWER_MODULES}"] if train.freeze_vision_tower else []))
    backend = engine_backend(config)
    engine_format = backend.engine_format(config) if config.needs_engine else EngineFormat()
    return TrainerSettings(
        hf_checkpoint=config.hf_checkpoint_path,
        initial_weights=initial_weights,
        optimizer=_optimizer(config, flags.lr, flags.lr_warmup_iters, num_rollout=max(1, num_rollout - num_critic_only)),
        loss=loss_settings(config),
        reference_weights=weights_directory(Path(reference)) if reference is not None else None,
        teacher_weights=teacher,
        ref_update_interval=train.ref_update_interval,
        critic=_critic(config, initial_weights, num_rollout) if config.trains_values else None,
        needs_old_logprobs=config.needs_old_logprobs,
        temperature=1.0 if config.is_sft else config.rollout.rollout_temperature,
        capacity=_capacity(config, train.max_tokens_per_gpu),
        score_capacity=_capacity(config, train.log_probs_max_tokens_per_gpu or train.max_tokens_per_gpu),
        shares_prefixes=_shares_prefixes(config, config.hf_checkpoint_path, teacher),
        chunk_tokens=train.log_probs_chunk_size,
        balance_data=train.balance_data,
        skips_zero_advantages=config.resolved_skip_zero_advantages,
        lora=_lora(config, initial_weights),
        trained=TrainedParameters(tuple(train.only_train_params_name_list), frozen),
        device=device,
        shares_device=device == "cuda" and (config.cluster.colocate or config.engine_capabilities.beside_trainer),
        stays_on_device=config.trainer_stays,
        precision=resolve_precision(config.model.precision, device),
        sync_dtype=None if engine_format.quantization is not None else backend.weight_dtype(config, device),
        engine_format=engine_format,
        num_ranks=config.num_train_gpus,
        seed=train.seed,
    )


def _optimizer(config: Config, lr: float, warmup_steps: int, *, num_rollout: int) -> OptimizerSettings:
    """Build the settings of one optimizer. `num_rollout`: rollouts that train the model, over which the learning rate decays by default."""
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
    """Build the settings of the value model."""
    given, flags = config.checkpoint.critic_load, config.optimizer
    lr = flags.lr if flags.critic_lr is None else flags.critic_lr
    return CriticSettings(
        initial_weights=policy_weights if given is None else value_weights_directory(Path(given)),
        optimizer=_optimizer(config, lr, flags.critic_lr_warmup_iters, num_rollout=num_rollout),
        clip=config.algorithm.value_clip,
        num_only_rollouts=config.algorithm.num_critic_only_steps,
        may_begin_at_resume=given is not None,
    )


def _lora(config: Config, initial_weights: Path) -> LoraSettings | None:
    """Build the settings of the adapter; None if the run trains no adapter.

    Raises CheckpointError if `--lora-adapter` cannot be read, and ConfigError if the reference model is not the policy without its adapter.
    """
    adapter = adapter_of(config)
    if adapter is None:
        return None
    first = weights_directory(Path(config.initial_weights_path or ""))
    if config.needs_reference and first.resolve() != initial_weights.resolve():
        raise ConfigError(
            f"cannot train an adapter on {initial_weights} with the reference {first}: with LoRA the reference is the policy without its "
            f"adapter; use the same weights for both (--ref-load {initial_weights})"
        )
    given = config.lora.lora_adapter
    start = None if given is None else adapter_directory(Path(given))
    named = config.syncs_adapter and config.engine_capabilities.names_adapters
    own = replace(adapter, base=str(initial_weights.absolute()))
    precision = config.lora.lora_base_precision
    base_precision = None if precision == "full" else precision
    return LoraSettings(own, start, is_merged=not config.syncs_adapter, is_named=named, base_precision=base_precision)


def _capacity(config: Config, max_tokens: int | None) -> Capacity:
    """Return the capacity of a micro-batch. Token limits are per GPU, so context-parallel ranks together hold a multiple of them."""
    num_sharing = config.parallel.context_parallel_size
    if config.train.use_dynamic_batch_size:
        return Capacity(max_tokens=None if max_tokens is None else max_tokens * num_sharing)
    if config.train.micro_batch_size is not None:
        return Capacity(max_samples=config.train.micro_batch_size)
    return Capacity(max_tokens=DEFAULT_MAX_TOKENS * num_sharing)


def _row_multiple(config: Config, common: TrainerSettings) -> int:
    """Return the multiple to which rows are padded. In FP8, each rank's part of a row must be a multiple of 16 tokens.

    Raises ConfigError if the trainer cannot compute in FP8 on this device or in this precision.
    """
    multiple, sizes, kind = config.train.data_pad_size_multiplier, config.parallel, config.megatron.get("fp8_format")
    if kind is None:
        return multiple
    if common.device != "cuda" or common.precision != "bf16":
        raise ConfigError(
            f"cannot use --fp8-format {kind} with --device {common.device} and --precision {common.precision}: training in FP8 needs a GPU "
            "with FP8 units and weights in bf16; drop --fp8-format, or use --device cuda --precision bf16"
        )
    return math.lcm(multiple, 16 * sizes.context_parallel_size * sizes.tensor_model_parallel_size)


def megatron_settings(config: Config, common: TrainerSettings) -> MegatronTrainerSettings:
    """Complete the common settings with those of the Megatron trainer."""
    sizes, train = config.parallel, config.train
    config_json, source = read_config_json(common.hf_checkpoint), str(common.hf_checkpoint / "config.json")
    architecture = architecture_of(config_json, source)
    if common.lora is not None:
        AdapterNames.of(names_of(config_json, source), common.lora.adapter, num_tensor_ranks=sizes.tensor_model_parallel_size)
    return MegatronTrainerSettings(
        **{each.name: getattr(common, each.name) for each in fields(TrainerSettings)},
        layout=layout_of(config),
        # Without --override-model-config, MODEL_ARGS that contradict config.json have already been rejected.
        model_flags={**stated_flags(config_json, source), **dict(config.megatron.items())},
        numerics=architecture.numerics,
        sparse_layers=SparseLayers.of(architecture),
        model_provider=config.model.custom_model_provider_path,
        parallel=sizes,
        mtp=train,
        optimizer_place=config.optimizer,
        dispatcher=sizes.moe_token_dispatcher_type,
        deepep=sizes.moe_enable_deepep,
        attention_backend=sizes.attention_backend,
        gradients_in_fp32=not config.megatron.get("grad_reduce_in_bf16"),
        pad_multiple_tokens=_row_multiple(config, common),
        routing=RoutingShape.of(architecture) if config.replays_routing else None,
        records_routing=config.replays_routing and not config.replays_engine_routing,
    )
