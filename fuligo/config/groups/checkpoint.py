"""The flags of the group `checkpoint`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


class CheckpointFlags(FlagGroup):
    """Sources and destinations of weights and training state."""

    load: str | None = flag(
        None, "directory to resume from; if it is empty or has no tracker file, the run starts from --ref-load", source="slime", path=True
    )
    ref_load: str | None = flag(None, "initial weights and reference model (default --hf-checkpoint)", source="slime", path=True)
    critic_load: str | None = flag(None, "initial weights of the value model (default: the policy's)", source="slime", path=True)
    save: str | None = flag(None, "directory for checkpoints (default: checkpoints/ in the run directory)", source="slime", path=True)
    save_interval: int | None = flag(
        None, "rollouts between checkpoints; the last rollout is always saved", unit="rollouts", source="slime", ge=1
    )
    save_hf: str | None = flag(None, "also export Hugging Face directories here; fuligo fills in {rollout_id}", source="slime", path=True)
    ckpt_step: int | None = flag(None, "resume from this iteration instead of the tracker file's", source="megatron", ge=0)
    async_save: bool = flag(False, "write checkpoints in the background while training continues", source="megatron")
    keep_checkpoints: int | None = flag(None, "keep only the newest N checkpoints", ge=1)
