"""The flags of the group `optimizer`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class OptimizerFlags(FlagGroup):
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adam"] = flag("adam", "optimizer", source="megatron")
    lr: float = flag(1e-6, "peak learning rate", source="megatron", ge=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", source="megatron", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "learning-rate schedule after the warm-up", source="megatron"
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr (default: the whole run)", unit="steps", source="megatron", ge=1
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", unit="steps", source="megatron", ge=0)
    critic_lr: float | None = flag(None, "peak learning rate of the value model (default --lr)", source="slime", ge=0)
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up for the value model", unit="steps", source="slime", ge=0)
    weight_decay: float = flag(0.01, "decoupled weight decay; not applied to norms and biases", source="megatron", ge=0)
    adam_beta1: float = flag(0.9, "Adam's beta 1", source="megatron", ge=0, lt=1)
    adam_beta2: float = flag(0.999, "Adam's beta 2", source="megatron", ge=0, lt=1)
    adam_eps: float = flag(1e-8, "Adam's epsilon", source="megatron", gt=0)
    clip_grad: float = flag(1.0, "maximum global gradient norm; 0 disables clipping", source="megatron", ge=0)
    use_distributed_optimizer: bool = flag(True, "shard the optimizer state over the data-parallel ranks", source="megatron")
    optimizer_cpu_offload: bool = flag(False, "keep the optimizer state and run the step on the CPU", source="megatron")
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "overlap copies of gradients and weights with the CPU step; with --optimizer-cpu-offload", source="megatron"
    )
    use_precision_aware_optimizer: bool = flag(
        False, "let the optimizer hold the fp32 weights and keep its state in lower precision", source="megatron"
    )
