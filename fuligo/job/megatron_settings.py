"""Settings of the Megatron trainer, from the configuration."""

from __future__ import annotations

from dataclasses import fields

from fuligo.config import Config
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.megatron import layout_of
from fuligo.models.registry import architecture_of
from fuligo.models.routing import RoutingShape
from fuligo.models.stated_flags import stated_flags
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, MTPSettings, OptimizerPlace, Recomputation, SparseLayers
from fuligo.trainer.ranks.settings import TrainerSettings


def megatron_settings(config: Config, common: TrainerSettings) -> MegatronTrainerSettings:
    """Complete the common settings with those of the Megatron trainer.

    Args:
        common: settings of any trainer

    Raises:
        ConfigError: config.json cannot be read, or the layout does not divide the ranks
    """
    sizes, optimizer, train = config.parallel, config.optimizer, config.train
    config_json, source = read_config_json(common.hf_checkpoint), str(common.hf_checkpoint / "config.json")
    architecture = architecture_of(config_json, source)
    return MegatronTrainerSettings(
        **{each.name: getattr(common, each.name) for each in fields(TrainerSettings)},
        layout=layout_of(config),
        # Without --override-model-config, MODEL_ARGS that contradict config.json were rejected.
        model_flags={**stated_flags(config_json, source), **dict(config.megatron.items())},
        sparse_layers=SparseLayers.of(architecture),
        model_provider=config.model.custom_model_provider_path,
        recomputation=Recomputation(
            sizes.recompute_granularity, sizes.recompute_method, sizes.recompute_num_layers, tuple(sizes.recompute_modules)
        ),
        mtp=MTPSettings(train.mtp_num_layers or 0, train.enable_mtp_training, train.mtp_loss_scaling_factor, train.mtp_joint_training),
        optimizer_place=OptimizerPlace(
            distributed=optimizer.use_distributed_optimizer,
            on_cpu=optimizer.optimizer_cpu_offload,
            overlap_transfers=optimizer.overlap_cpu_optimizer_d2h_h2d,
            precision_aware=optimizer.use_precision_aware_optimizer,
        ),
        dispatcher=sizes.moe_token_dispatcher_type,
        deepep=sizes.moe_enable_deepep,
        attention_backend=sizes.attention_backend,
        gradients_in_fp32=not config.megatron.get("grad_reduce_in_bf16"),
        pad_multiple_tokens=train.data_pad_size_multiplier,
        routing=RoutingShape.of(architecture) if config.replays_routing else None,
        records_routing=config.replays_routing and not config.replays_engine_routing,
    )
