"""Rewards: built-in rules by name, a remote reward model, or a user's function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.rollout.rewards.custom import CustomReward
from fuligo.rollout.rewards.rules import RULES, find_rule
from fuligo.rollout.rewards.runner import ExtraReward, RewardRunner

if TYPE_CHECKING:
    from fuligo.config import Config

__all__ = [
    "RULES", "CustomReward", "ExtraReward", "RewardRunner", "find_rule", "reward_runner",
]  # fmt: skip


def reward_runner(config: Config) -> RewardRunner:
    """Build the reward runner of a run. Raises ConfigError if a reward type is unknown or lacks a flag, HookError if a hook is unusable."""
    from fuligo.config.args_view import ArgsView
    from fuligo.config.hooks import hook_of, load_hook

    flags, function = config.reward, hook_of(config, "custom_rm_path")
    args = ArgsView(config)
    custom = None if function is None else CustomReward(function, args, flags.rm_timeout_s)
    paths, weights = flags.extra_rm_path, flags.extra_rm_weights
    extra = [
        ExtraReward(
            path.replace(":", ".").rpartition(".")[2], CustomReward(load_hook("extra_rm_path", path), args, flags.rm_timeout_s), weight
        )
        for path, weight in zip(paths, weights or [1.0] * len(paths), strict=True)
    ]
    optional = config.algorithm.use_opd and flags.rm_type is None and config.data.metadata_key is None
    return RewardRunner(flags, custom, extra, optional=optional)
