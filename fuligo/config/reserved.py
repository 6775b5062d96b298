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

_DATA = "use --prompt-data, files or ORG/NAME:SPLIT on the Hub"
_EACH_SAMPLE_ONCE = "leave it out: every sample is trained once (--num-steps-per-rollout cuts a rollout into optimizer steps)"
_LORA = "use --lora-rank"
_MODEL = "use --hf-checkpoint, a directory or ORG/NAME on the Hub"
_OFFLOAD = "leave it out: --colocate offloads each side while the other works"
_ROUTER = "leave it out: fuligo starts the router (engines that run elsewhere: --rollout-external-engine-addrs)"
_SHARDED = "leave it out: the torch trainer shards over all its GPUs (--actor-num-gpus-per-node)"
_VLLM = "leave it out: engines are SGLang servers (--rollout-backend sglang) or the embedded engine"

_OF_SLIME = {
    "lr_warmup_fraction": "use --lr-warmup-iters",
    "use_slime_router": "leave it out: fuligo always runs sglang-router in front of the engines",
    "sglang_router_ip": _ROUTER,
    "sglang_router_port": _ROUTER,
    "sglang_server_concurrency": "use --rollout-concurrency, which counts the requests of all engines together",
    "megatron_to_hf_mode": "leave it out: fuligo converts weight names with its own tables",
    "model_name": "leave it out: fuligo reads the model type from config.json",
    "loss_mask_type": "leave it out: the mask of assistant tokens comes from the chat template",
    "disable_compute_advantages_and_returns": "leave it out: --loss-type sft_loss computes no advantages",
    "prefill_num_servers": "use server groups of worker_type prefill and decode in --sglang-config",
    "multimodal_keys": "fuligo trains on text only",
    "custom_convert_samples_to_train_data_path": "fuligo has no such hook; change samples with --rollout-sample-filter-path or "
    "--rollout-data-postprocess-path, and rewards with --custom-reward-post-process-path",
    "custom_megatron_init_path": "fuligo has no such hook; --custom-model-provider-path builds the model on every rank",
    "custom_megatron_before_log_prob_hook_path": "fuligo has no such hook; --rollout-data-postprocess-path is called after "
    "log-probabilities are computed, without the model",
    "custom_megatron_before_train_step_hook_path": "use --before-train-step-path; it is called once per rollout, with the batch "
    "and without the model",
    "keep_old_actor": "set --use-rollout-logprobs or --use-tis: the engines' log-probabilities are those of the policy that sampled",
    "wandb_key": "set WANDB_API_KEY (or WANDB_KEY) in the environment of the run",
    "offload": _OFFLOAD,
    "offload_train": _OFFLOAD,
    "offload_rollout": _OFFLOAD,
    "no_offload_train": "leave it out: --colocate always offloads the trainer while the engines work",
    "no_offload_rollout": "leave it out: --colocate always offloads the engines while the trainer works",
    "ref_ckpt_step": "use --ref-load with the directory of that iteration",
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
    "train_memory_margin_bytes": "leave it out: fuligo reserves no margin of the trainer's memory",
    "ci_test": "leave it out: it checks slime itself",
}
_OF_TRL = {
    "model": _MODEL,
    "model_name_or_path": _MODEL,
    "dataset_name": _DATA,
    "reward_funcs": "use --rm-type, or --custom-rm-path for a function of your own",
    "output_dir": "use --run-dir",
    "run_name": "use --name",
    "resume_from_checkpoint": "use --load",
    "learning_rate": "use --lr",
    "lr_scheduler_type": "use --lr-decay-style",
    "warmup_steps": "use --lr-warmup-iters, in optimizer steps",
    "warmup_ratio": "use --lr-warmup-iters, in optimizer steps",
    "max_grad_norm": "use --clip-grad",
    "num_train_epochs": "use --num-epoch",
    "max_steps": "use --num-rollout",
    "save_steps": "use --save-interval, in rollouts",
    "eval_steps": "use --eval-interval, in rollouts",
    "logging_steps": "leave it out: every step is recorded",
    "report_to": "set --use-wandb, --use-tensorboard, --use-trackio, --use-mlflow or --sink-path",
    "hub_model_id": "use --push-to-hub ORG/NAME with --save-hf",
    "per_device_train_batch_size": "use --global-batch-size, the samples of an optimizer step on all devices together",
    "gradient_accumulation_steps": "leave it out: --max-tokens-per-gpu or --micro-batch-size cuts the --global-batch-size",
    "num_generations": "use --n-samples-per-prompt",
    "num_iterations": _EACH_SAMPLE_ONCE,
    "max_prompt_length": "use --rollout-max-prompt-len",
    "max_completion_length": "use --rollout-max-response-len",
    "max_new_tokens": "use --rollout-max-response-len",
    "beta": "set --use-kl-loss --kl-loss-coef",
    "epsilon": "use --eps-clip",
    "epsilon_high": "use --eps-clip-high",
    "delta": "use --eps-clip-c",
    "scale_rewards": "use --disable-grpo-std-normalization where it is none",
    "use_vllm": _VLLM,
    "vllm_mode": _VLLM,
    "vllm_gpu_memory_utilization": "use --sglang-mem-fraction-static",
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "use_peft": _LORA,
    "lora_r": _LORA,
}
_OF_VERL = {
    "train_files": "use --prompt-data",
    "val_files": "use --eval-prompt-data NAME FILE",
    "train_batch_size": "use --rollout-batch-size, in prompts",
    "max_response_length": "use --rollout-max-response-len",
    "rollout.n": "use --n-samples-per-prompt",
    "rollout.name": _VLLM,
    "rollout.temperature": "use --rollout-temperature",
    "rollout.tensor_model_parallel_size": "use --rollout-num-gpus-per-engine",
    "model.path": _MODEL,
    "optim.lr": "use --lr",
    "ppo_mini_batch_size": "use --global-batch-size, in samples: multiply by --n-samples-per-prompt",
    "ppo_micro_batch_size_per_gpu": "use --micro-batch-size",
    "ppo_max_token_len_per_gpu": "set --use-dynamic-batch-size --max-tokens-per-gpu",
    "use_dynamic_bsz": "set --use-dynamic-batch-size",
    "ppo_epochs": _EACH_SAMPLE_ONCE,
    "adv_estimator": "use --advantage-estimator (gae is called ppo)",
    "clip_ratio": "use --eps-clip",
    "clip_ratio_low": "use --eps-clip",
    "clip_ratio_high": "use --eps-clip-high",
    "clip_ratio_c": "use --eps-clip-c",
    "entropy_coeff": "use --entropy-coef",
    "loss_agg_mode": "use --calculate-per-token-loss for token-mean",
    "gpu_memory_utilization": "use --sglang-mem-fraction-static",
    "total_epochs": "use --num-epoch",
    "total_training_steps": "use --num-rollout",
    "save_freq": "use --save-interval, in rollouts",
    "test_freq": "use --eval-interval, in rollouts",
    "default_local_dir": "use --save",
    "resume_mode": "use --load",
    "experiment_name": "use --name",
    "project_name": "use --wandb-project",
    "trainer.nnodes": "use --actor-num-nodes",
    "n_gpus_per_node": "use --actor-num-gpus-per-node",
    "nproc_per_node": "use --actor-num-gpus-per-node",
}
"""verl's settings, named by as many of the last parts as make them unambiguous."""

_GUESSED = {
    "lora": _LORA,
    "use_lora": _LORA,
    "enable_lora": _LORA,
    "data": _DATA,
    "dataset": _DATA,
    "train_data": _DATA,
    "output": "use --run-dir",
    "save_dir": "use --save",
    "checkpoint_dir": "use --save",
    "resume": "use --load, the directory of checkpoints",
    "steps": "use --num-rollout",
    "group_size": "use --n-samples-per-prompt",
    "reward_fn": "use --rm-type, or --custom-rm-path for a function of your own",
    "max_tokens": "use --rollout-max-response-len",
    "max_length": "use --rollout-max-response-len",
    "stop": "use --rollout-stop",
    "save_every": "use --save-interval, in rollouts",
    "eval_every": "use --eval-interval, in rollouts",
}
"""Names that people try first."""

MOVED = _OF_SLIME | _OF_TRL | _OF_VERL | _GUESSED
"""Flat name of a setting that slime, TRL or verl have, or that people try, and fuligo has not -> what to use instead."""


def elsewhere(name: str) -> str:
    """Return `; use --lr` for a name of `MOVED`, or nothing.

    Args:
        name: `learning_rate`, or with dots as verl's `actor_rollout_ref.actor.optim.lr`.
    """
    parts = name.replace("-", "_").split(".")
    for first in range(len(parts)):
        advice = MOVED.get(".".join(parts[first:]))
        if advice is not None:
            return f"; {advice}"
    return "; docs/coming-from.md translates the settings of other frameworks" if len(parts) > 1 else ""
