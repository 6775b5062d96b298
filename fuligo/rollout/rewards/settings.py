"""Settings of rewards, independent of the configuration as a whole."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuligo.config.secret import Secret
from fuligo.errors import ConfigError
from fuligo.rollout.rewards.rules import BOXED_PREFIX, find_rule

if TYPE_CHECKING:
    from fuligo.config import Config


@dataclass(slots=True, frozen=True)
class RewardSettings:
    """Settings of the reward runner."""

    rm_type: str | None = None
    """Reward type of samples whose metadata name none; None: a custom reward, or metadata only."""
    rm_url: str | Secret | None = None
    timeout_s: float = 30.0
    retries: int = 3
    num_workers: int | None = None
    """Worker processes per judge; None: one per core, at most 4."""
    group_rm: bool = False
    reward_key: str | None = None
    """Key of a dict reward whose value is the scalar reward."""
    optional: bool = False
    """Samples without a reward type get the reward 0, because a teacher trains them (--use-opd)."""
    keyless_dicts: bool = False
    """Dict rewards need no `reward_key`, because a post-processing hook computes the scalar."""

    def check(self) -> None:
        """Check that the settings fit each other and the installed packages.

        Raises ConfigError if the reward type is unknown, or lacks a flag or a package.
        """
        if self.rm_type is None:
            return
        rule = find_rule(self.rm_type)
        if self.rm_type.removeprefix(BOXED_PREFIX) == "remote_rm" and self.rm_url is None:
            raise ConfigError(f"--rm-type {self.rm_type} needs --rm-url, the URL of the reward model")
        if self.rm_type.removeprefix(BOXED_PREFIX) == "ifbench" and importlib.util.find_spec("if_verifiable") is None:
            raise ConfigError(
                f"--rm-type {self.rm_type} needs the package if-verifiable, which is not installed: pip install 'fuligo[ifbench]'"
            )
        if rule.keys and self.reward_key not in rule.keys and not self.keyless_dicts:
            given = "is not set" if self.reward_key is None else f"({self.reward_key}) is none of them"
            raise ConfigError(
                f"--rm-type {self.rm_type} returns a dict of {', '.join(rule.keys)}, but --reward-key {given}; "
                "choose --reward-key score (1 or -1) or --reward-key acc (1 or 0)"
            )


def reward_settings(config: Config) -> RewardSettings:
    """Return the reward settings of a run, checked.

    Raises:
        ConfigError: see `RewardSettings.check`.
    """
    reward = config.reward
    settings = RewardSettings(
        rm_type=None if reward.custom_rm_path is not None else reward.rm_type,
        rm_url=reward.rm_url,
        timeout_s=reward.rm_timeout_s,
        retries=reward.rm_retries,
        num_workers=reward.rm_num_workers,
        group_rm=reward.group_rm,
        reward_key=reward.reward_key,
        optional=config.algorithm.use_opd and reward.rm_type is None and config.data.metadata_key is None,
        keyless_dicts=reward.custom_reward_post_process_path is not None,
    )
    settings.check()
    return settings
