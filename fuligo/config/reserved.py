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

_EACH_SAMPLE_ONCE = "leave it out: every sample is trained once (--num-steps-per-rollout cuts a rollout into optimizer steps)"
_LORA = "fuligo trains all weights; LoRA is not implemented"
_OFFLOAD = "leave it out: --colocate offloads each side while the other works"
_ROUTER = "leave it out: fuligo starts the router (engines that run elsewhere: --rollout-external-engine-addrs)"
_SHARDED = "leave it out: the torch trainer shards over all its GPUs (--actor-num-gpus-per-node)"
_VLLM = "leave it out: engines are SGLang servers (--rollout-backend sglang) or the embedded engine"

_OF_SLIME = {
    "lr_warmup_fraction": "give --lr-warmup-iters",
    "use_slime_router": "leave it out: fuligo always runs sglang-router in front of the engines",
    "sglang_router_ip": _ROUTER,
    "sglang_router_port": _ROUTER,
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
    "offload": _OFFLOAD,
    "offload_train": _OFFLOAD,
    "offload_rollout": _OFFLOAD,
    "no_offload_train": "leave it out: --colocate always offloads the trainer while the engines work",
    "no_offload_rollout": "leave it out: --colocate always offloads the engines while the trainer works",
    "ref_ckpt_step": "give --ref-load the directory of that iteration",
    "update_weight_delta_encoding": "leave it out: fuligo has one encoding of changed weights",
    "update_weight_delta_checksum": "leave it out: fuligo chooses the checksum",
    "update_weight_disk_dir": "leave it out: fuligo writes weights below the run directory",
    "update_weight_local_checkpoint_dir": "leave it out: engines keep their weights in memory",
    "update_weight_disk_keep_files": "leave it out: fuligo removes weights that every engine has taken",
    "rollout_data_transport": "leave it out: fuligo chooses how rollouts reach the trainer",
    "use_distributed_post": "leave it out: fuligo sends all requests from one process",
    "log_passrate": "leave it out: pass rates are always logged",
    "log_multi_turn": "leave it out: fuligo has no such metrics",
    "log_correct_samples": "leave it out: fuligo has no such metrics",
    "disable_wandb_random_suffix": "leave it out: run names have no random suffix",
    "ci_test": "leave it out: it checks slime itself",
}
_OF_TRL = {
    "model": "give --hf-checkpoint, a directory",
    "model_name_or_path": "give --hf-checkpoint, a directory",
    "dataset_name": "give --prompt-data, a jsonl or parquet file",
    "reward_funcs": "give --rm-type, or --custom-rm-path for a function of your own",
    "output_dir": "give --run-dir",
    "run_name": "give --name",
    "resume_from_checkpoint": "give --load",
    "learning_rate": "give --lr",
    "lr_scheduler_type": "give --lr-decay-style",
    "warmup_steps": "give --lr-warmup-iters, in optimizer steps",
    "warmup_ratio": "give --lr-warmup-iters, in optimizer steps",
    "max_grad_norm": "give --clip-grad",
    "num_train_epochs": "give --num-epoch",
    "max_steps": "give --num-rollout",
    "save_steps": "give --save-interval, in rollouts",
    "eval_steps": "give --eval-interval, in rollouts",
    "logging_steps": "leave it out: every step is recorded",
    "report_to": "give --use-wandb, --use-tensorboard or --sink-path",
    "push_to_hub": "leave it out: fuligo does not upload; --save-hf writes directories that you can upload",
    "per_device_train_batch_size": "give --global-batch-size, the samples of an optimizer step on all devices together",
    "gradient_accumulation_steps": "leave it out: --max-tokens-per-gpu or --micro-batch-size cuts the --global-batch-size",
    "num_generations": "give --n-samples-per-prompt",
    "num_iterations": _EACH_SAMPLE_ONCE,
    "max_prompt_length": "give --rollout-max-prompt-len",
    "max_completion_length": "give --rollout-max-response-len",
    "max_new_tokens": "give --rollout-max-response-len",
    "beta": "give --use-kl-loss --kl-loss-coef",
    "epsilon": "give --eps-clip",
    "epsilon_high": "give --eps-clip-high",
    "delta": "give --eps-clip-c",
    "scale_rewards": "give --disable-grpo-std-normalization where it is none",
    "use_vllm": _VLLM,
    "vllm_mode": _VLLM,
    "vllm_gpu_memory_utilization": "give --sglang-mem-fraction-static",
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "use_peft": _LORA,
    "lora_r": _LORA,
    "lora_alpha": _LORA,
    "lora_rank": _LORA,
    "lora_target_modules": _LORA,
}
_OF_VERL = {
    "train_files": "give --prompt-data",
    "val_files": "give --eval-prompt-data NAME FILE",
    "train_batch_size": "give --rollout-batch-size, in prompts",
    "max_response_length": "give --rollout-max-response-len",
    "rollout.n": "give --n-samples-per-prompt",
    "rollout.name": _VLLM,
    "rollout.temperature": "give --rollout-temperature",
    "rollout.tensor_model_parallel_size": "give --rollout-num-gpus-per-engine",
    "model.path": "give --hf-checkpoint, a directory",
    "optim.lr": "give --lr",
    "ppo_mini_batch_size": "give --global-batch-size, in samples: multiply by --n-samples-per-prompt",
    "ppo_micro_batch_size_per_gpu": "give --micro-batch-size",
    "ppo_max_token_len_per_gpu": "give --use-dynamic-batch-size --max-tokens-per-gpu",
    "use_dynamic_bsz": "give --use-dynamic-batch-size",
    "ppo_epochs": _EACH_SAMPLE_ONCE,
    "adv_estimator": "give --advantage-estimator (gae is called ppo)",
    "clip_ratio": "give --eps-clip",
    "clip_ratio_low": "give --eps-clip",
    "clip_ratio_high": "give --eps-clip-high",
    "clip_ratio_c": "give --eps-clip-c",
    "entropy_coeff": "give --entropy-coef",
    "loss_agg_mode": "give --calculate-per-token-loss for token-mean",
    "gpu_memory_utilization": "give --sglang-mem-fraction-static",
    "total_epochs": "give --num-epoch",
    "total_training_steps": "give --num-rollout",
    "save_freq": "give --save-interval, in rollouts",
    "test_freq": "give --eval-interval, in rollouts",
    "default_local_dir": "give --save",
    "resume_mode": "give --load",
    "experiment_name": "give --name",
    "project_name": "give --wandb-project",
    "trainer.nnodes": "give --actor-num-nodes",
    "n_gpus_per_node": "give --actor-num-gpus-per-node",
    "nproc_per_node": "give --actor-num-gpus-per-node",
}
"""verl's settings, named by as many of the last parts as make them unambiguous."""

MOVED = _OF_SLIME | _OF_TRL | _OF_VERL
"""Flat name of a setting of slime, TRL or verl that fuligo does not have -> what to give instead."""


def elsewhere(name: str) -> str:
    """Return `; give --lr` for a setting that slime, TRL or verl have and fuligo has not, or nothing.

    Args:
        name: `learning_rate`, or with dots as verl's `actor_rollout_ref.actor.optim.lr`.
    """
    parts = name.replace("-", "_").split(".")
    for first in range(len(parts)):
        advice = MOVED.get(".".join(parts[first:]))
        if advice is not None:
            return f"; {advice}"
    return "; docs/coming-from.md translates the settings of other frameworks" if len(parts) > 1 else ""
