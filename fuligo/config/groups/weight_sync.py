"""The flags of the group `weight_sync`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class WeightSyncFlags(FlagGroup):
    """Weight sync from the trainer to the engines."""

    update_weight_transport: Literal["auto", "tensor", "nccl", "gloo", "disk"] = flag(
        "auto", "auto: tensor for shared GPUs or processes, nccl to separate SGLang GPUs, else disk", source="slime"
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full", "send all weights, or what changed since the last weight sync", source="slime"
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "size of one bucket of weights", unit="bytes", source="slime", ge=1)
    update_weights_interval: int = flag(1, "rollouts between weight syncs", unit="rollouts", source="slime", ge=1)
    check_weight_update_equal: bool = flag(
        False, "after each weight sync, verify that the engine's weights equal the trainer's", source="slime"
    )
