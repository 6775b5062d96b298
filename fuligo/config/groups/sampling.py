"""Flags of sampling: prompts, rollouts, rewards, evaluation."""

from __future__ import annotations

from typing import Any, Literal

from fuligo.config.flag import FlagGroup, flag
from fuligo.config.secret import Url


class DataFlags(FlagGroup):
    """Prompts: files, columns, order."""

    prompt_data: str | None = flag(None, "jsonl or parquet file, with an optional slice: FILE@[a:b]", source="slime", path=True)
    input_key: str = flag("input", "column with the prompt: text or chat messages", source="slime")
    label_key: str | None = flag(None, "column with the reference answer for the reward", source="slime")
    metadata_key: str | None = flag(None, "column with an object that becomes sample.metadata", source="slime")
    tool_key: str | None = flag(None, "column with tool definitions for the chat template", source="slime")
    apply_chat_template: bool = flag(False, "apply the tokenizer's chat template to prompts (text becomes a user message)", source="slime")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "further arguments of the template, as a JSON object", source="slime")
    rollout_shuffle: bool = flag(False, "shuffle prompts, differently in every epoch", source="slime")
    rollout_seed: int = flag(42, "seed of the data order and of sampling", source="slime", ge=0)
    num_rollout: int | None = flag(None, "rollouts to run", source="slime", ge=1)
    num_epoch: int | None = flag(None, "passes over the data, instead of --num-rollout", source="slime", ge=1)
    skip_bad_rows: bool = flag(False, "skip and count malformed rows instead of rejecting the file")
    sft_rewritten_turns: Literal["per-turn", "rendered", "refuse"] = flag(
        "per-turn",
        "supervised conversations whose earlier assistant turns the chat template renders differently once later ones follow: per-turn "
        "trains each turn as the model writes it, in a sample of its own; rendered trains the form in the whole conversation",
    )
    rollout_max_prompt_len: int | None = flag(None, "drop and count longer prompts", unit="tokens", source="slime", ge=1)
    data_source_path: str | None = flag(None, "hook: class with get_samples, add_samples, save, load, __len__", source="slime")


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
    rollout_concurrency: int | None = flag(
        None, "maximum number of requests in flight (default: as many as the engines run at a time)", unit="requests", ge=1
    )
    rollout_timeout_s: float = flag(1800.0, "deadline for generating one sample", unit="s", gt=0)
    rollout_retries: int = flag(3, "retries of a request that failed in an engine", ge=0)
    custom_generate_function_path: str | None = flag(
        None, "hook: async (args, sample, sampling_params) -> Sample | list[Sample]", source="slime"
    )
    rollout_function_path: str | None = flag(
        None, "hook: (args, rollout_id, data_source, evaluation=False), replaces sampling", source="slime"
    )
    rollout_sample_filter_path: str | None = flag(None, "hook: (args, groups), called with all kept groups before training", source="slime")


class RewardFlags(FlagGroup):
    """Rewards of responses."""

    rm_type: str | None = flag(
        None,
        "built-in reward: math, deepscaler, dapo, f1, gpqa, ifbench, random, remote_rm; the prefix boxed_ scores the last \\boxed{}",
        source="slime",
    )
    rm_url: Url | None = flag(None, "URL of the remote reward model", source="slime")
    rm_timeout_s: float = flag(30.0, "deadline per reward", unit="s", gt=0)
    rm_retries: int = flag(3, "retries of a remote reward", ge=0)
    rm_num_workers: int | None = flag(None, "processes that compute rewards (default: up to 4, depending on cores)", ge=1)
    custom_rm_path: str | None = flag(None, "hook: async (args, sample) -> float | dict", source="slime")
    group_rm: bool = flag(False, "call the custom reward with the samples of a group; it returns a list", source="slime")
    reward_key: str | None = flag(None, "key of the value to learn from, if the reward is a dict", source="slime")
    eval_reward_key: str | None = flag(None, "key of the value to report in evaluations (default --reward-key)", source="slime")
    custom_reward_post_process_path: str | None = flag(None, "hook: (args, samples) -> (raw, rewards)", source="slime")


EVAL_NAME = r"^[^/\s]+$"
"""Pattern of data-set names; metrics are named `eval/<name>/...`."""


class EvalFlags(FlagGroup):
    """Evaluation on held-out prompts. Settings that are not given follow the rollout's."""

    eval_interval: int | None = flag(
        None, "rollouts between evaluations; the last rollout is always evaluated", unit="rollouts", source="slime", ge=1
    )
    eval_prompt_data: list[str] = flag([], "NAME PATH pairs; a single PATH gets the name aime", source="slime", path=True)
    eval_config: str | None = flag(
        None, "YAML file of data sets, each with its own sampling settings and reward", source="slime", path=True
    )
    n_samples_per_eval_prompt: int = flag(1, "responses per prompt", unit="samples", source="slime", ge=1)
    eval_max_response_len: int | None = flag(None, "longest response", unit="tokens", source="slime", ge=1)
    eval_temperature: float | None = flag(None, "sampling temperature; 0 is greedy", source="slime", ge=0)
    eval_top_p: float | None = flag(None, "nucleus sampling", source="slime", gt=0, le=1)
    eval_top_k: int | None = flag(None, "top-k sampling", source="slime", ge=-1)
    skip_eval_before_train: bool = flag(False, "skip the evaluation before the first step", source="slime")
