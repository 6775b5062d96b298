"""The flags of the group `debug`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


class DebugFlags(FlagGroup):
    """Runs of one side of the system alone."""

    debug_rollout_only: bool = flag(False, "sample and score, never train", source="slime")
    debug_train_only: bool = flag(False, "train on --load-debug-rollout-data, start no engine", source="slime")
    save_debug_rollout_data: str | None = flag(
        None, "file for the samples of each rollout; fuligo fills in {rollout_id}", source="slime", path=True
    )
    load_debug_rollout_data: str | None = flag(
        None, "file with saved samples of each rollout; fuligo fills in {rollout_id}", source="slime", path=True
    )
