"""Flags of slime's scripts, and what TRL calls its settings, that fuligo does not have: what to do instead."""

from __future__ import annotations

MOVED = {
    "lr_warmup_fraction": "give --lr-warmup-iters",
    "use_slime_router": "leave it out: sglang-router stands before the engines",
    "sglang_router_ip": "leave it out: fuligo starts the router (engines that run elsewhere: --rollout-external-engine-addrs)",
    "sglang_router_port": "leave it out: fuligo starts the router (engines that run elsewhere: --rollout-external-engine-addrs)",
    "sglang_server_concurrency": "limit an engine with --sglang-max-running-requests",
    "megatron_to_hf_mode": "leave it out: names of weights are converted by fuligo's own tables",
    "model_name": "leave it out: config.json says which model it is",
    "loss_mask_type": "leave it out: the mask of assistant tokens comes from the chat template",
    "disable_compute_advantages_and_returns": "leave it out: --loss-type sft_loss computes none",
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
"""Flat name -> advice."""
