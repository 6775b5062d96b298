"""The flags of the group `model`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class ModelFlags(FlagGroup):
    """The policy model."""

    hf_checkpoint: str | None = flag(None, "Hugging Face directory: tokenizer, engine weights, model shape", source="slime", path=True)
    model_config_file: str | None = flag(
        None, "a config.json to plan with where the checkpoint is not on this machine (or the directory with it)", path=True
    )
    override_model_config: bool = flag(
        False, "MODEL_ARGS win over the checkpoint's config.json; without it a disagreement is an error", source="slime"
    )
    custom_model_provider_path: str | None = flag(
        None, "hook: (pre_process, post_process, vp_stage=...), makes Megatron's model", source="slime"
    )
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute type of the trainer (weights stay fp32); auto: bf16 on CUDA, fp32 on a CPU"
    )
    gradient_checkpointing: bool = flag(False, "recompute every layer's activations in the backward pass")
