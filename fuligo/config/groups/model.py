"""The flags of the group `model`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class ModelFlags(FlagGroup):
    """Policy model."""

    hf_checkpoint: str | None = flag(None, "Hugging Face directory: tokenizer, engine weights, model shape", source="slime", path=True)
    model_config_file: str | None = flag(
        None, "config.json (or its directory) to plan with if the checkpoint is not on this machine", path=True
    )
    override_model_config: bool = flag(
        False, "let MODEL_ARGS override the checkpoint's config.json; without this flag a disagreement is an error", source="slime"
    )
    custom_model_provider_path: str | None = flag(
        None, "hook: (pre_process, post_process, vp_stage=...), builds Megatron's model", source="slime"
    )
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute dtype of the trainer (master weights stay fp32); auto: bf16 on CUDA, fp32 on a CPU"
    )
    gradient_checkpointing: bool = flag(False, "recompute every layer's activations in the backward pass")
