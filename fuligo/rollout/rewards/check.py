"""Check of the reward flags, and of the packages that they require."""

import importlib.util

from fuligo.config.groups import RewardFlags
from fuligo.errors import ConfigError
from fuligo.rollout.rewards.rules import BOXED_PREFIX, find_rule


def check_reward(flags: RewardFlags) -> None:
    """Check that a built-in reward has the flags and packages that it needs.

    Raises ConfigError if the reward type is unknown, or lacks a flag or a package.
    """
    if flags.rm_type is None or flags.custom_rm_path is not None:
        return
    rule = find_rule(flags.rm_type)
    if flags.rm_type.removeprefix(BOXED_PREFIX) == "remote_rm" and flags.rm_url is None:
        raise ConfigError(f"--rm-type {flags.rm_type} needs --rm-url, the URL of the reward model")
    if flags.rm_type.removeprefix(BOXED_PREFIX) == "ifbench" and importlib.util.find_spec("if_verifiable") is None:
        raise ConfigError(
            f"--rm-type {flags.rm_type} needs the package if-verifiable, which is not installed; pip install 'fuligo[ifbench]'"
        )
    if rule.keys and flags.reward_key not in rule.keys and flags.custom_reward_post_process_path is None:
        given = "is not set" if flags.reward_key is None else f"({flags.reward_key}) is not one of them"
        raise ConfigError(
            f"--rm-type {flags.rm_type} returns a dict of {', '.join(rule.keys)}, but --reward-key {given}; "
            "choose --reward-key score (1 or -1) or --reward-key acc (1 or 0)"
        )
