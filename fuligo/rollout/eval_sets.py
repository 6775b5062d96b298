"""Evaluation datasets and their settings, from `--eval-prompt-data` or `--eval-config`.

The YAML file:

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}    # for all datasets; optional
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16}
        - {name: gsm8k, path: gsm8k.parquet, label_key: answer}

Missing settings come from the eval flags, then from the rollout flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError, field_validator

from fuligo.config.flag import FlagGroup, flag
from fuligo.config.flags import did_you_mean, nearest
from fuligo.config.groups import DataFlags, RewardFlags
from fuligo.config.groups.sampling import EVAL_NAME
from fuligo.config.rules.required import lacking_column
from fuligo.config.yaml_text import load, read_yaml_text, yaml_problem
from fuligo.engines.generation import SamplingParams
from fuligo.errors import ConfigError
from fuligo.rollout.generate import sampling_params
from fuligo.rollout.rewards.check import check_reward

if TYPE_CHECKING:
    from fuligo.config import Config


class EvalSetSpec(FlagGroup):
    """Settings of one dataset; None takes the value of the flags."""

    name: str = flag("", "name in the metrics", min_length=1, pattern=EVAL_NAME)
    path: list[str] = flag([], "file or files, as --prompt-data takes them", min_length=1)
    n_samples_per_eval_prompt: int | None = flag(None, "responses to each prompt", ge=1)
    max_response_len: int | None = flag(None, "maximum response length", unit="tokens", ge=1)
    temperature: float | None = flag(None, "sampling temperature; 0 is greedy", ge=0)
    top_p: float | None = flag(None, "nucleus sampling: cumulative probability", gt=0, le=1)
    top_k: int | None = flag(None, "sample from the k most likely tokens; -1 keeps all", ge=-1)
    rm_type: str | None = flag(None, "built-in reward, as --rm-type takes it")
    custom_rm_path: str | None = flag(None, "hook: reward, as --custom-rm-path takes it")
    reward_key: str | None = flag(None, "key of the value to report, if the reward is a dict")
    input_key: str | None = flag(None, "column with the prompt")
    label_key: str | None = flag(None, "column with the answer")
    metadata_key: str | None = flag(None, "column with an object that becomes sample.metadata")
    tool_key: str | None = flag(None, "column with tool definitions")
    apply_chat_template: bool | None = flag(None, "apply the tokenizer's chat template")

    @field_validator("path", mode="before")
    @classmethod
    def _one_entry(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and value else value

    def has_own_reward(self, config: Config) -> bool:
        """Return whether the dataset's reward differs from the training reward, or training has none."""
        own = any(value is not None for value in (self.rm_type, self.custom_rm_path, self.reward_key))
        return own or config.is_unjudged or bool(config.reward.extra_rm_path) or config.resolved_eval_reward_key != config.reward.reward_key

    def custom_reward_path(self, config: Config) -> str | None:
        """Return the path of the dataset's reward hook; None for a built-in reward."""
        return self.custom_rm_path or (config.reward.custom_rm_path if self.rm_type is None else None)

    def reward_flags(self, config: Config) -> RewardFlags:
        """Return the flags of the dataset's reward: those of the training reward, overridden by the dataset's settings."""
        custom = self.custom_reward_path(config)
        own = {
            "custom_rm_path": custom,
            "rm_type": None if custom else self.rm_type or config.reward.rm_type,
            "reward_key": self.reward_key or config.resolved_eval_reward_key,
            "group_rm": config.reward.group_rm and custom is not None,
        }
        return config.reward.model_copy(update=own)

    def data_flags(self, config: Config) -> DataFlags:
        """Return the data flags, overridden by the dataset's settings."""
        own = {"input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template"}
        return config.data.model_copy(update=self.model_dump(include=own, exclude_none=True))

    def sampling_params(self, config: Config) -> SamplingParams:
        """Return the sampling parameters of the dataset."""
        own = {f"rollout_{name}": getattr(self, name) for name in ("max_response_len", "temperature", "top_p", "top_k")}
        given = {name: value for name, value in own.items() if value is not None}
        return sampling_params(config.eval_rollout.model_copy(update=given))


def eval_set_specs(config: Config) -> list[EvalSetSpec]:
    """Read the settings of all datasets. Raises ConfigError if they cannot be read or are invalid, or name a dataset twice."""
    specs = [EvalSetSpec(name=name, path=[path]) for name, path in config.eval_data_sets.items()]
    if config.eval.eval_config is not None:
        specs += _read(Path(config.eval.eval_config))
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"evaluation datasets need different names; listed twice: {', '.join(twice)}")
    if problems := [problem for spec in specs for problem in _reward_problem(config, spec)]:
        raise ConfigError(*problems)
    return specs


def _reward_problem(config: Config, spec: EvalSetSpec) -> Iterator[str]:
    try:
        flags = spec.reward_flags(config)
        check_reward(flags)
    except ConfigError as error:
        yield f"evaluation dataset {spec.name}: {error}"
        return
    label_key, metadata_key = spec.label_key or config.data.label_key, spec.metadata_key or config.data.metadata_key
    lacking = flags.rm_type and lacking_column(flags.rm_type, label_key=label_key, metadata_key=metadata_key)
    if lacking:
        yield f"evaluation dataset {spec.name}: {lacking[0]}; {lacking[1]}"


def _read(path: Path) -> list[EvalSetSpec]:
    try:
        content = load(read_yaml_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --eval-config {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read --eval-config {path}: it is not valid YAML: {yaml_problem(error)}") from error
    section = content.get("eval") if isinstance(content, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("datasets"), list) or section.keys() - {"defaults", "datasets"}:
        raise ConfigError(f"--eval-config {path}: the file must hold `eval:` with a list `datasets:`, optionally `defaults:`, nothing else")
    defaults = section.get("defaults") or {}
    if not isinstance(defaults, dict) or not all(isinstance(entry, dict) for entry in section["datasets"]):
        raise ConfigError(f"--eval-config {path}: `defaults` and each entry of `datasets` must be a mapping")
    problems: list[str] = []
    specs = [
        _spec({**defaults, **entry}, f"--eval-config {path}: dataset {number}", problems)
        for number, entry in enumerate(section["datasets"], 1)
    ]
    if problems:
        raise ConfigError(*problems)
    return [spec for spec in specs if spec is not None]


def _spec(entry: dict[Any, Any], place: str, problems: list[str]) -> EvalSetSpec | None:
    known = EvalSetSpec.model_fields
    if unknown := [str(key) for key in entry if key not in known]:
        problems += [f"{place}: unknown key {key}{did_you_mean(nearest(key, known))}" for key in unknown]
        return None
    try:
        return EvalSetSpec(**entry)
    except ValidationError as error:
        problems += [f"{place}: {'.'.join(map(str, e['loc']))}: {e['msg']} (given: {e['input']!r})" for e in error.errors()]
        return None
