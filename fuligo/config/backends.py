"""Which flags belong to which backend. A backend that is left to `auto` follows from them alone, so that `plan` and `train` agree."""

from __future__ import annotations

from fuligo.config.groups.parallel import ParallelFlags

MEGATRON_FLAGS = (
    *ParallelFlags.model_fields,
    "use_distributed_optimizer",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "mtp_num_layers",
    "enable_mtp_training",
    "mtp_loss_scaling_factor",
    "mtp_joint_training",
    "use_routing_replay",
    "use_rollout_routing_replay",
    "override_model_config",
    "custom_model_provider_path",
)
"""Flags that only the Megatron trainer has; so are all of the group `megatron`."""
TORCH_FLAGS = ("gradient_checkpointing",)
"""Flags that only the torch trainer has."""
SGLANG_FLAGS = ("rollout_num_gpus", "rollout_num_gpus_per_engine", "sglang_config")
"""Flags that only SGLang engines have; so are all of the groups `sglang` and `router`."""
EMBEDDED_FLAGS = ("embedded_max_running_requests", "embedded_max_total_tokens", "embedded_dtype", "embedded_num_threads")
"""Flags that only the embedded engine has."""
