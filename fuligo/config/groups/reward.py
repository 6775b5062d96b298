"""The flags of the group `reward`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


class RewardFlags(FlagGroup):
    """Rewards of responses."""

    rm_type: str | None = flag(
        None,
        "built-in reward: math, deepscaler, dapo, f1, gpqa, ifbench, random, remote_rm; the prefix boxed_ scores the last \\boxed{}",
        source="slime",
    )
    rm_url: str | None = flag(None, "URL of the remote reward model", source="slime")
    rm_timeout_s: float = flag(30.0, "deadline per reward", unit="s", gt=0)
    rm_retries: int = flag(3, "retries of a remote reward", ge=0)
    rm_num_workers: int | None = flag(None, "processes that compute rewards (default: up to 4, depending on cores)", ge=1)
    custom_rm_path: str | None = flag(None, "hook: async (args, sample) -> float | dict", source="slime")
    group_rm: bool = flag(False, "call the custom reward with the samples of a group; it returns a list", source="slime")
    reward_key: str | None = flag(None, "key of the value to learn from, if the reward is a dict", source="slime")
    eval_reward_key: str | None = flag(None, "key of the value to report in evaluations (default --reward-key)", source="slime")
    custom_reward_post_process_path: str | None = flag(None, "hook: (args, samples) -> (raw, rewards)", source="slime")
