"""The flags of the group `debug`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


class DebugFlags(FlagGroup):
    """One side of the system alone."""

    debug_rollout_only: bool = flag(False, "sample and judge, never train", source="slime")
    debug_train_only: bool = flag(False, "train on --load-debug-rollout-data, start no engine", source="slime")
    save_debug_rollout_data: str | None = flag(None, "save each rollout's samples; {rollout_id} is replaced", source="slime", path=True)
    load_debug_rollout_data: str | None = flag(None, "train on saved rollouts; {rollout_id} is replaced", source="slime", path=True)
