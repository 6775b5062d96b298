"""Flags of slime's scripts that fuligo does not have: what to do instead."""

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
}
"""Flat name -> advice."""
