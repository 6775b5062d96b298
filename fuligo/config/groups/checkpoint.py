"""The flags of the group `checkpoint`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


class CheckpointFlags(FlagGroup):
    """Where weights and state come from and go to."""

    load: str | None = flag(
        None, "where training resumes; empty or without a tracker file: starts from --ref-load", source="slime", path=True
    )
    ref_load: str | None = flag(None, "reference model and first weights (default --hf-checkpoint)", source="slime", path=True)
    critic_load: str | None = flag(
        None, "first weights of the value model (default: where the policy's come from)", source="slime", path=True
    )
    save: str | None = flag(None, "where checkpoints go (default: the run directory's checkpoints/)", source="slime", path=True)
    save_interval: int | None = flag(
        None, "rollouts between checkpoints; the last rollout always saves", unit="rollouts", source="slime", ge=1
    )
    save_hf: str | None = flag(None, "also export Hugging Face directories here; {rollout_id} is replaced", source="slime", path=True)
    ckpt_step: int | None = flag(None, "resume from this iteration instead of the tracker's", source="megatron", ge=0)
    async_save: bool = flag(False, "write checkpoints while training goes on", source="megatron")
    keep_checkpoints: int | None = flag(None, "keep only the newest N checkpoints", ge=1)
