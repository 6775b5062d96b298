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
    saved = config.trainer_capabilities.saved_bytes
    if subject.adapter is not None:
        return _disk(config, saved.adapter * subject.adapter.num_parameters, FP32 * subject.adapter.num_parameters)
    num_parameters = model.num_parameters + (model.num_mtp_parameters if config.train.mtp_num_layers else 0)
    trained = (saved.weights + 2 * FP32) * (2 if config.trains_values else 1)
    reference = saved.reference if config.train.ref_update_interval is not None else 0
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
