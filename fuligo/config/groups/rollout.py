"""The flags of the group `rollout`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class RolloutFlags(FlagGroup):
    """Sampling of responses."""

    rollout_batch_size: int = flag(32, "prompts per rollout", unit="prompts", source="slime", ge=1)
    n_samples_per_prompt: int = flag(8, "responses per prompt", unit="samples", source="slime", ge=1)
    rollout_max_response_len: int = flag(1024, "maximum response length", unit="tokens", source="slime", ge=1)
    rollout_max_context_len: int | None = flag(None, "maximum length of prompt + response", unit="tokens", source="slime", ge=2)
    rollout_temperature: float = flag(1.0, "sampling temperature", source="slime", gt=0)
    rollout_top_p: float = flag(1.0, "nucleus sampling: cumulative probability", source="slime", gt=0, le=1)
    rollout_top_k: int = flag(-1, "sample from the k most likely tokens; -1 keeps all", source="slime", ge=-1)
    rollout_min_p: float = flag(0.0, "exclude tokens below this fraction of the highest probability", ge=0, lt=1)
    rollout_stop: list[str] = flag([], "strings that end a response", source="slime")
    rollout_stop_token_ids: list[int] = flag([], "token ids that end a response", source="slime")
    over_sampling_batch_size: int | None = flag(
        None, "prompts per sampling wave (default --rollout-batch-size)", unit="prompts", source="slime", ge=1
    )
    dynamic_sampling_filter_path: str | None = flag(None, "hook: keep or drop a finished group", source="slime")
    max_sampling_waves: int = flag(100, "sampling waves after which a rollout that is still not full ends the run", ge=1)
    sampling_order: Literal["first-finished", "submission"] = flag(
        "first-finished", "order in which groups fill a rollout; first-finished favours short answers, submission does not"
    )
    partial_rollout: bool = flag(False, "keep aborted samples and continue them in a later rollout", source="slime")
    buffer_filter_path: str | None = flag(
        None, "hook: choose groups from the buffer of partial rollouts (default pop_first)", source="slime"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(False, "mask tokens that were sampled in an earlier rollout", source="slime")
    max_staleness: int | None = flag(None, "drop samples that started more than this many versions ago", unit="versions", ge=0)
    async_mode: Literal["sync", "one-step", "full"] = flag(
        "sync", "one-step: sample rollout k+1 while training on k; full: sample continuously, at most --max-staleness versions behind"
    )
    rollout_concurrency: int = flag(512, "maximum number of requests in flight", unit="requests", ge=1)
    rollout_timeout_s: float = flag(1800.0, "deadline for generating one sample", unit="s", gt=0)
    rollout_retries: int = flag(3, "retries of a request that failed in an engine", ge=0)
    custom_generate_function_path: str | None = flag(
        None, "hook: async (args, sample, sampling_params) -> Sample | list[Sample]", source="slime"
    )
    rollout_function_path: str | None = flag(
        None, "hook: (args, rollout_id, data_source, evaluation=False), replaces sampling", source="slime"
    )
    rollout_sample_filter_path: str | None = flag(None, "hook: (args, groups), called with all kept groups before training", source="slime")
