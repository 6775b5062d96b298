"""Names that fuligo refuses, each with what to give instead."""

from __future__ import annotations

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

MOVED = {
    "lr_warmup_fraction": "give --lr-warmup-iters",
    "use_slime_router": "leave it out: fuligo always runs sglang-router in front of the engines",
    "sglang_router_ip": "leave it out: fuligo starts the router (engines that run elsewhere: --rollout-external-engine-addrs)",
    "sglang_router_port": "leave it out: fuligo starts the router (engines that run elsewhere: --rollout-external-engine-addrs)",
    "sglang_server_concurrency": "give --rollout-concurrency, which counts the requests of all engines together",
    "megatron_to_hf_mode": "leave it out: fuligo converts weight names with its own tables",
    "model_name": "leave it out: fuligo reads the model type from config.json",
    "loss_mask_type": "leave it out: the mask of assistant tokens comes from the chat template",
    "disable_compute_advantages_and_returns": "leave it out: --loss-type sft_loss computes no advantages",
    "prefill_num_servers": "give server groups of worker_type prefill and decode in --sglang-config",
    "multimodal_keys": "fuligo trains on text only",
    "custom_config_path": "give hooks their settings by a file of theirs or by --env",
    "keep_old_actor": "give --use-rollout-logprobs or --use-tis: the engines' log-probabilities are those of the policy that sampled",
    "wandb_key": "set WANDB_API_KEY in the environment",
    "model": "give --hf-checkpoint, a directory",
    "model_name_or_path": "give --hf-checkpoint, a directory",
    "dataset_name": "give --prompt-data, a jsonl or parquet file",
    "output_dir": "give --run-dir",
    "learning_rate": "give --lr",
    "num_train_epochs": "give --num-epoch",
    "max_steps": "give --num-rollout",
    "num_generations": "give --n-samples-per-prompt",
    "max_prompt_length": "give --rollout-max-prompt-len",
    "max_completion_length": "give --rollout-max-response-len",
    "max_new_tokens": "give --rollout-max-response-len",
    "beta": "give --use-kl-loss --kl-loss-coef",
}
"""Flat name of a flag of slime's scripts or of TRL that fuligo does not have -> what to give instead."""
