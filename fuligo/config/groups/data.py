"""The flags of the group `data`."""

from __future__ import annotations

from typing import Any

from fuligo.config.group import FlagGroup, flag


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
    rollout_max_prompt_len: int | None = flag(None, "drop and count longer prompts", unit="tokens", source="slime", ge=1)
    data_source_path: str | None = flag(None, "hook: class with get_samples, add_samples, save, load, __len__", source="slime")
