"""Flags of sampling: prompts, rollouts, rewards, evaluation."""

from typing import Any, Literal

from pydantic import field_validator, model_validator

from fuligo.config.flag import FlagGroup, flag, slime
from fuligo.config.secret import Url


class DataFlags(FlagGroup):
    """Prompts: files, columns, order."""

    prompt_data: list[str] = slime(
        [],
        "prompt files: .jsonl, .parquet, .arrow, .csv, patterns of them, folders that `datasets` saved, datasets on the Hub as "
        "ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT; each with an optional slice: FILE@[a:b]",
        path=True,
    )
    prompt_data_weights: list[float] = flag([], "how often an epoch draws the rows of each entry of --prompt-data (default: once)")
    input_key: str = slime("input", "column with the prompt: text or chat messages")
    label_key: str | None = slime(None, "column with the reference answer for the reward")
    metadata_key: str | None = slime(None, "column with an object that becomes sample.metadata")
    multimodal_keys: dict[str, str] = slime(
        {}, 'column of each kind of media in prompts, as a JSON object: {"image": COLUMN}; its images replace <image> in the prompt'
    )
    tool_key: str | None = slime(None, "column with tool definitions for the chat template")
    apply_chat_template: bool = slime(False, "apply the tokenizer's chat template to prompts (text becomes a user message)")
    apply_chat_template_kwargs: dict[str, Any] = slime({}, "additional arguments of the template, as a JSON object")
    rollout_shuffle: bool = slime(False, "shuffle prompts, differently in every epoch")
    rollout_seed: int = slime(42, "seed of the data order and of sampling", ge=0)
    num_rollout: int | None = slime(None, "rollouts to run", ge=1)
    num_epoch: int | None = slime(None, "passes over the data, instead of --num-rollout", ge=1)
    skip_bad_rows: bool = flag(False, "skip and count malformed rows instead of rejecting the file")
    sft_rewritten_turns: Literal["per-turn", "rendered", "refuse"] = flag(
        "per-turn",
        "SFT with a chat template that rewrites earlier assistant turns: per-turn makes a sample of each turn, as the model writes it; "
        "rendered trains the whole conversation as rendered; refuse rejects the row",
    )
    rollout_max_prompt_len: int | None = slime(None, "drop and count longer prompts", unit="tokens", ge=1)
    data_source_path: str | None = slime(
        None, "hook: class (args) with get_samples, add_samples, save, load, __len__; provides the prompts"
    )

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_entry(cls, value: Any) -> Any:
        """Accept a single entry as a string, the usual form in config files."""
        return [] if value is None else [value] if isinstance(value, str) else value

    @property
    def image_key(self) -> str | None:
        """Column with the images of a prompt; None without images."""
        return self.multimodal_keys.get("image")

    @property
    def keys(self) -> list[str]:
        """Columns to read from the prompt files."""
        return [key for key in (self.input_key, self.label_key, self.metadata_key, self.tool_key, self.image_key) if key is not None]


class RolloutFlags(FlagGroup):
    """Sampling of responses."""

    rollout_batch_size: int = slime(32, "prompts per rollout", unit="prompts", ge=1)
    n_samples_per_prompt: int = slime(8, "responses per prompt", unit="samples", ge=1)
    rollout_max_response_len: int = slime(1024, "maximum response length", unit="tokens", ge=1)
    rollout_max_context_len: int | None = slime(
        None, "maximum length of prompt + response (default: the engine's context)", unit="tokens", ge=2
    )
    rollout_temperature: float = slime(1.0, "sampling temperature", gt=0)
    rollout_top_p: float = slime(1.0, "nucleus sampling: cumulative probability", gt=0, le=1)
    rollout_top_k: int = slime(-1, "sample from the k most likely tokens; -1 keeps all", ge=-1)
    rollout_min_p: float = flag(0.0, "exclude tokens below this fraction of the highest probability", ge=0, lt=1)
    rollout_stop: list[str] = slime([], "strings that end a response")
    rollout_stop_token_ids: list[int] = slime([], "token ids that end a response")
    over_sampling_batch_size: int | None = slime(None, "prompts per sampling wave (default --rollout-batch-size)", unit="prompts", ge=1)
    dynamic_sampling_filter_path: str | None = slime(None, "hook: (args, samples) -> keep, or (keep, reason), for every finished group")
    max_sampling_waves: int = flag(100, "maximum sampling waves per rollout; if the rollout is not full after them, the run ends", ge=1)
    sampling_order: Literal["first-finished", "submission"] = flag(
        "first-finished", "order in which groups fill a rollout; first-finished favors short answers, submission does not"
    )
    partial_rollout: bool = slime(False, "keep aborted samples and continue them in a later rollout")
    buffer_filter_path: str | None = slime(
        None, "hook: (args, rollout_id, buffer, num_samples) -> interrupted groups to continue (default: those that have waited longest)"
    )
    mask_offpolicy_in_partial_rollout: bool = slime(False, "mask tokens that were sampled in an earlier rollout")
    max_staleness: int | None = flag(
        None,
        "discard groups with a token more than this many versions old, and sample their prompts again (default: no limit)",
        unit="versions",
        ge=0,
    )
    async_mode: Literal["sync", "one-step", "full"] = flag(
        "sync",
        "sync: sample and train in turn; one-step: sample rollout k+1 while training on k; full: sample continuously, at most "
        "--max-staleness versions behind",
    )
    rollout_concurrency: int | None = flag(
        None, "maximum number of requests in flight (default: the number that the engines run at a time)", unit="requests", ge=1
    )
    rollout_timeout_s: float = flag(1800.0, "deadline for generating one sample", unit="s", gt=0)
    rollout_retries: int = flag(3, "retries of a request that failed in an engine", ge=0)
    custom_generate_function_path: str | None = slime(None, "hook: async (args, sample, sampling_params) -> Sample | list[Sample]")
    agent: str | None = flag(
        None, "hook: (session, row) -> reward, async or not; the agent calls the policy through the OpenAI API at session.base_url"
    )
    agent_timeout_s: float = flag(600.0, "deadline of an agent for one sample; interruptions do not count", unit="s", gt=0)
    agent_sampling: Literal["refuse", "replace"] = flag(
        "refuse", "for agent requests whose temperature, top_p or penalty differs from the rollout's: refuse them, or replace the value"
    )
    agent_host: str = flag("127.0.0.1", "address at which agents reach the policy; for agents on other machines it must not be loopback")
    environment: str | None = flag(
        None, "hook: class (row, settings) with reset, step, close; every sample is an episode of this environment", path=True
    )
    environment_settings: dict[str, Any] = flag({}, "settings of the environment, as a JSON object")
    environment_isolation: Literal["auto", "process", "none"] = flag(
        "auto",
        "where episodes run: each in a separate process (process), or all in the process of the run (none); auto: process, unless the "
        "class sets `isolated = False` or cannot be imported by name",
    )
    environment_variables: list[str] = flag(
        [], "environment variables to pass to the processes of environments although their names suggest a key or token"
    )
    environment_memory_mb: int | None = flag(
        None, "memory limit of an episode's process, including the Python interpreter (default: none)", unit="MiB", ge=128
    )
    max_turns: int = flag(16, "maximum number of model turns in an episode", unit="turns", ge=1)
    turn_timeout_s: float = flag(60.0, "deadline for each call of the environment", unit="s", gt=0)
    episode_timeout_s: float | None = flag(None, "deadline for an episode (default --rollout-timeout-s)", unit="s", gt=0)
    rollout_function_path: str | None = slime(None, "hook: (args, rollout_id, data_source, evaluation=False), replaces sampling")
    rollout_sample_filter_path: str | None = slime(None, "hook: (args, groups), called with all kept groups before training")
    rollout_all_samples_process_path: str | None = slime(
        None, "hook: (args, groups, data_source), called with all groups of a rollout, including dropped ones"
    )


class RewardFlags(FlagGroup):
    """Rewards of responses."""

    rm_type: str | None = slime(
        None, "built-in reward: math, deepscaler, dapo, f1, gpqa, ifbench, random, remote_rm; the prefix boxed_ scores the last \\boxed{}"
    )
    rm_url: Url | None = slime(None, "URL of the remote reward model")
    rm_timeout_s: float = flag(30.0, "deadline per reward", unit="s", gt=0)
    rm_retries: int = flag(3, "retries of a remote reward", ge=0)
    rm_num_workers: int | None = flag(None, "processes that compute rewards (default: up to 4, depending on the CPU cores)", ge=1)
    custom_rm_path: str | None = slime(None, "hook: (args, sample) -> float | dict, async or not")
    extra_rm_path: list[str] = flag([], "hook: functions (args, sample) -> float whose values are added to the training reward")
    extra_rm_weights: list[float] = flag([], "weight of each additional reward (default 1; the main reward has weight 1)")
    group_rm: bool = slime(False, "call the custom reward with the samples of a group; it returns a list")
    reward_key: str | None = slime(None, "key of the value to learn from, if the reward is a dict")
    eval_reward_key: str | None = slime(None, "key of the value to report in evaluations (default --reward-key)")
    custom_reward_post_process_path: str | None = slime(
        None, "hook: (args, samples) -> (raw, rewards), replaces the rewards and their normalization"
    )


EVAL_NAME = r"^[^/\s]+$"
"""Pattern of dataset names; metrics are named `eval/<name>/...`."""


class EvalFlags(FlagGroup):
    """Evaluation on held-out prompts. Response length, temperature, top-p and top-k are the rollout's by default."""

    eval_interval: int | None = slime(
        None, "rollouts between evaluations (default: evaluate only before the first and after the last one)", unit="rollouts", ge=1
    )
    eval_prompt_data: list[str] = slime([], "evaluation datasets as NAME PATH pairs; a single PATH gets the name aime", path=True)
    eval_config: str | None = slime(None, "YAML file of datasets, each with its own sampling settings and reward", path=True)
    eval_function_path: str | None = slime(
        None, "hook: (args, rollout_id, data_source, evaluation=True) -> {name: samples}, replaces the evaluation"
    )
    n_samples_per_eval_prompt: int = slime(1, "responses per prompt", unit="samples", ge=1)
    eval_max_response_len: int | None = slime(None, "maximum response length (default --rollout-max-response-len)", unit="tokens", ge=1)
    eval_temperature: float | None = slime(None, "sampling temperature; 0 is greedy (default --rollout-temperature)", ge=0)
    eval_top_p: float | None = slime(None, "nucleus sampling: cumulative probability (default --rollout-top-p)", gt=0, le=1)
    eval_top_k: int | None = slime(None, "sample from the k most likely tokens; -1 keeps all (default --rollout-top-k)", ge=-1)
    eval: bool = flag(
        True, "evaluate if there is data for it; --no-eval drops all other evaluation flags, including those in a config file"
    )
    skip_eval_before_train: bool = slime(False, "skip the evaluation before the first step")

    @model_validator(mode="before")
    @classmethod
    def without_others(cls, values: Any) -> Any:
        """Drop all other evaluation flags if `eval` is false, so that --no-eval overrides a config file."""
        return {"eval": False} if isinstance(values, dict) and values.get("eval") is False else values
