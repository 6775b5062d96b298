"""The flags of the group `reward`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


class RewardFlags(FlagGroup):
    """How responses are judged."""

    rm_type: str | None = flag(
        None, "math, deepscaler, dapo, f1, gpqa, ifbench, random, remote_rm; prefix boxed_ takes the last \\boxed{}", source="slime"
    )
    rm_url: str | None = flag(None, "address of the remote reward model", source="slime")
    rm_timeout_s: float = flag(30.0, "deadline of one reward", unit="s", gt=0)
    rm_retries: int = flag(3, "further tries of a remote reward", ge=0)
    rm_num_workers: int | None = flag(None, "processes that compute rewards (default: up to 4, by cores)", ge=1)
    custom_rm_path: str | None = flag(None, "hook: async (args, sample) -> float | dict", source="slime")
    group_rm: bool = flag(False, "the custom reward takes and returns a whole group's list", source="slime")
    reward_key: str | None = flag(None, "which value to learn from where a reward is a dict", source="slime")
    eval_reward_key: str | None = flag(None, "which value to report in evaluation (default --reward-key)", source="slime")
    custom_reward_post_process_path: str | None = flag(None, "hook: (args, samples) -> (raw, rewards)", source="slime")
