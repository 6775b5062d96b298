"""The flags of the group `rollout`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class RolloutFlags(FlagGroup):
    """How responses are sampled."""

    rollout_batch_size: int = flag(32, "prompts of one rollout", unit="prompts", source="slime", ge=1)
    n_samples_per_prompt: int = flag(8, "responses to each prompt", unit="samples", source="slime", ge=1)
    rollout_max_response_len: int = flag(1024, "longest response", unit="tokens", source="slime", ge=1)
    rollout_max_context_len: int | None = flag(None, "longest prompt + response", unit="tokens", source="slime", ge=2)
    rollout_temperature: float = flag(1.0, "sampling temperature", source="slime", gt=0)
    rollout_top_p: float = flag(1.0, "nucleus sampling", source="slime", gt=0, le=1)
    rollout_top_k: int = flag(-1, "sample among the k likeliest tokens; -1 is all", source="slime", ge=-1)
    rollout_min_p: float = flag(0.0, "drop tokens below this share of the likeliest one's probability", ge=0, lt=1)
    rollout_stop: list[str] = flag([], "strings that end a response", source="slime")
    rollout_stop_token_ids: list[int] = flag([], "token ids that end a response", source="slime")
    over_sampling_batch_size: int | None = flag(
        None, "prompts of one sampling wave (default --rollout-batch-size)", unit="prompts", source="slime", ge=1
    )
    dynamic_sampling_filter_path: str | None = flag(None, "hook: keep or drop a finished group", source="slime")
    max_sampling_waves: int = flag(100, "waves after which a filter that drops everything ends the run", ge=1)
    sampling_order: Literal["first-finished", "submission"] = flag(
        "first-finished", "which groups fill a rollout; first-finished favours short answers, submission does not"
    )
    partial_rollout: bool = flag(False, "keep aborted samples and continue them in a later rollout", source="slime")
    buffer_filter_path: str | None = flag(None, "hook: choose groups from the partial-rollout buffer (default pop_first)", source="slime")
    mask_offpolicy_in_partial_rollout: bool = flag(False, "do not train on tokens of an earlier rollout", source="slime")
    max_staleness: int | None = flag(None, "drop samples that began more than K versions ago", unit="versions", ge=0)
    async_mode: Literal["sync", "one-step", "full"] = flag(
        "sync", "one-step: sample rollout k+1 while training on k; full: sample all the time, at most --max-staleness versions behind"
    )
    rollout_concurrency: int = flag(512, "requests in flight at a time", unit="requests", ge=1)
    rollout_timeout_s: float = flag(1800.0, "deadline of one sample's generation", unit="s", gt=0)
    rollout_retries: int = flag(3, "further tries of a request that an engine failed", ge=0)
    custom_generate_function_path: str | None = flag(
        None, "hook: async (args, sample, sampling_params) -> Sample | list[Sample]", source="slime"
    )
    rollout_function_path: str | None = flag(
        None, "hook: (args, rollout_id, data_source, evaluation=False), replaces the rollout", source="slime"
    )
    rollout_sample_filter_path: str | None = flag(None, "hook: (args, groups), sees all kept groups before training", source="slime")
