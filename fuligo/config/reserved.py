"""Names that fuligo refuses, each with what to use instead."""

_EACH_ENGINE = "fuligo chooses it for every engine"
_CLIENT = "fuligo talks to its engines over plain HTTP"

RESERVED: dict[str, dict[str, str]] = {
    "sglang": {
        "model_path": "--hf-checkpoint sets it (for one model of several: model_path in --sglang-config)",
        "tp_size": "--rollout-num-gpus-per-engine sets it (divided by --sglang-pp-size; in --sglang-config: num_gpus_per_engine)",
        "device": "--device sets it",
        "weight_version": "fuligo sets it to the policy version, with the number of the engine",
        "disaggregation_mode": "worker_type in --sglang-config sets it",
        "config": "fuligo passes every argument itself; engine groups go into --sglang-config",
        "host": _EACH_ENGINE,
        "port": _EACH_ENGINE,
        "nccl_port": _EACH_ENGINE,
        "dist_init_addr": _EACH_ENGINE,
        "nnodes": _EACH_ENGINE,
        "node_rank": _EACH_ENGINE,
        "base_gpu_id": _EACH_ENGINE,
        "gpu_id_step": _EACH_ENGINE,
        "grpc_mode": _CLIENT,
        "use_ray": "fuligo places the engines itself",
    },
    "router": {
        "host": "fuligo chooses it",
        "port": "fuligo chooses it",
        "worker_urls": "fuligo registers its engines",
        "prefill": "fuligo registers its engines (worker_type prefill in --sglang-config)",
        "decode": "fuligo registers its engines (worker_type decode in --sglang-config)",
        "pd_disaggregation": "worker types prefill and decode in --sglang-config set it",
        "mini_lb": "fuligo runs the full router",
        "service_discovery": "fuligo registers its engines",
    },
    "megatron": {},
}
"""Group -> argument that fuligo sets itself -> the flag or rule that decides it."""
