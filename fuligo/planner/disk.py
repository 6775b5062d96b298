"""Space that the checkpoints of a run take on disk."""

import math

from fuligo.config import Config
from fuligo.planner.memory.activations import BF16, FP32
from fuligo.planner.plan import Disk
from fuligo.planner.subject import Subject


def disk_of_checkpoints(subject: Subject) -> Disk | None:
    """Return the space of checkpoints and exports; None if the run saves none."""
    config, model = subject.config, subject.architecture
    if config.debug.debug_rollout_only:
        return None
    megatron = config.resolved_train_backend == "megatron"
    if subject.adapter is not None:
        # Megatron's has the values three times: as the model's, as the optimizer's, and as a PEFT directory.
        copies = 5 if megatron else 3
        return _disk(config, FP32 * copies * subject.adapter.num_parameters, FP32 * subject.adapter.num_parameters)
    num_parameters = model.num_parameters + (model.num_mtp_parameters if config.train.mtp_num_layers else 0)
    # Megatron's checkpoints also hold the weights that the model computes with.
    weights = FP32 + (BF16 if megatron else 0)
    trained = (weights + 2 * FP32) * (2 if config.trains_values else 1)
    reference = (BF16 if megatron else FP32) if config.train.ref_update_interval is not None else 0
    return _disk(config, num_parameters * (trained + reference), num_parameters * BF16)


def _disk(config: Config, checkpoint_bytes: int, export_bytes: int) -> Disk:
    saves, keep, exports = _num_saves(config), config.checkpoint.keep_checkpoints, config.checkpoint.save_hf
    return Disk(
        checkpoint_bytes=checkpoint_bytes,
        num_checkpoints=saves if keep is None else keep + 1 if saves is None else min(saves, keep + 1),
        export_bytes=export_bytes if exports is not None else 0,
        num_exports=0 if exports is None else saves if "{rollout_id}" in exports else 1,
    )


def _num_saves(config: Config) -> int | None:
    """Return the number of saves; None if it depends on the number of prompts."""
    interval, num_rollouts = config.checkpoint.save_interval, config.data.num_rollout
    if interval is None:
        return 1
    return None if num_rollouts is None else math.ceil(num_rollouts / interval)
