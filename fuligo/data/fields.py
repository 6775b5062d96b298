"""Settings of the data, and the fields of a row, read by the configured keys and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuligo.data.images import PLACEHOLDER, RawImage, check_placeholders, read_images
from fuligo.errors import DataError
from fuligo.types import Messages

if TYPE_CHECKING:
    from fuligo.config import Config
    from fuligo.data.assistant_turns import RewrittenTurns


@dataclass(slots=True, frozen=True)
class DataSettings:
    """Conversion of rows to prompts, and their order."""

    input_key: str = "input"
    """Column with the prompt: a string or chat messages."""
    label_key: str | None = None
    metadata_key: str | None = None
    image_key: str | None = None
    """Column with the images of a prompt; see `images.read_images`."""
    tool_key: str | None = None
    """Column with tool definitions: a list, or a list as JSON string."""
    apply_chat_template: bool = False
    """Render messages with the tokenizer's template; a plain string becomes one user message."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    """Limit above which rows are dropped and counted."""
    skip_bad_rows: bool = False
    """Skip and count malformed rows instead of raising."""
    rewritten_turns: RewrittenTurns = "per-turn"
    """Supervised conversations whose earlier turns the chat template rewrites; see `AssistantTurns.sequences`."""
    end_ids: frozenset[int] = frozenset()
    """Tokens at which the model stops, to end supervised turns."""
    weights: tuple[float, ...] = ()
    """Times that an epoch draws the rows of each entry of --prompt-data; empty for once."""
    shuffle: bool = False
    seed: int = 42

    @property
    def keys(self) -> list[str]:
        """Columns that are read."""
        return [key for key in (self.input_key, self.label_key, self.metadata_key, self.tool_key, self.image_key) if key is not None]


def data_settings(config: Config) -> DataSettings:
    """Build the settings from the data flags. In supervised training the length limit applies to the whole conversation."""
    data = config.data
    return DataSettings(
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        image_key=data.multimodal_keys.get("image"),
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        max_prompt_tokens=data.rollout_max_prompt_len,
        skip_bad_rows=data.skip_bad_rows,
        rewritten_turns=data.sft_rewritten_turns,
        weights=tuple(data.prompt_data_weights),
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
    )


@dataclass(slots=True, frozen=True)
class Fields:
    """Content of one row before tokenization."""

    prompt: str | Messages
    label: Any
    metadata: dict[str, Any]
    tools: list[Any] | None
    images: tuple[RawImage, ...] = ()


def read_fields(row: dict[str, Any], settings: DataSettings, place: Callable[[], str], directory: Path) -> Fields:
    """Read the fields of a row. Raises DataError if a key is missing, or its value is invalid.

    Args:
        directory: directory that paths of images are relative to
        place: returns the file and line of the row; called for errors only
    """
    try:
        tools = _tools(row, settings.tool_key)
        metadata = _metadata(row, settings.metadata_key)
        label = None if settings.label_key is None else _value(row, settings.label_key, "--label-key")
        if label is None and settings.label_key is not None:
            raise DataError(f"{settings.label_key!r} (--label-key) is null: the row has no label")
        prompt = _prompt(row, settings)
        return Fields(
            prompt=prompt,
            label=label,
            metadata=metadata if tools is None else {**metadata, "tools": tools},
            tools=tools,
            images=_images(row, settings, prompt, directory),
        )
    except DataError as error:
        raise DataError(f"cannot use {place()}: {error}") from None


def _value(row: dict[str, Any], key: str, flag: str) -> Any:
    if key not in row:
        raise DataError(f"no key {key!r} ({flag}); the row has {', '.join(map(repr, row)) or 'none'}")
    return row[key]


def _prompt(row: dict[str, Any], settings: DataSettings) -> str | Messages:
    key = settings.input_key
    prompt = _value(row, key, "--input-key")
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{key!r} is an empty string")
        return [{"role": "user", "content": prompt}] if settings.apply_chat_template else prompt
    messages = check_messages(prompt, key, has_images=settings.image_key is not None)
    if not settings.apply_chat_template:
        raise DataError(f"{key!r} holds chat messages; use --apply-chat-template to render them with the tokenizer's template")
    return messages


def _images(row: dict[str, Any], settings: DataSettings, prompt: str | Messages, directory: Path) -> tuple[RawImage, ...]:
    if settings.image_key is None or isinstance(prompt, str):
        return ()
    images = read_images(_value(row, settings.image_key, "--multimodal-keys"), settings.image_key, directory)
    check_placeholders(prompt, len(images), settings.image_key)
    return images


def check_messages(value: Any, key: str, *, has_images: bool = False) -> Messages:
    """Return chat messages without their null fields (columnar files fill missing fields with null).

    `has_images`: image parts of a message's content become placeholders. Raises DataError if `value` is not a list of messages with a role
    and content.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} must be a string or a list of chat messages, not {value!r:.80}")
    messages: Messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{key!r}: a chat message is {{"role": ..., "content": ...}}, not {message!r:.80}')
        kept = {name: part for name, part in message.items() if part is not None or name == "content"}
        if kept.get("content") is None and not kept.get("tool_calls"):
            raise DataError(f"{key!r}: the {message['role']} message has no content")
        if kept.get("content") is not None:
            kept["content"] = _text(kept["content"], f"{key!r}: the content of the {message['role']} message", has_images)
        messages.append(kept)
    return messages


def _text(content: Any, name: str, has_images: bool) -> str:
    """Join the text parts of a message, because many chat templates silently drop content that is not a string."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if has_images:
        parts = [{"type": "text", "text": PLACEHOLDER} if _is_image(part) else part for part in parts]
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise DataError(f'{name} must be text, or a list of {{"type": "text", "text": ...}}, not {content!r:.80}')
    return "".join(part["text"] for part in parts)


def _is_image(part: Any) -> bool:
    """Return whether a part of a message stands for an image of the row's column, and brings none of its own."""
    return isinstance(part, dict) and part.get("type") == "image" and all(value is None for key, value in part.items() if key != "type")


def _metadata(row: dict[str, Any], key: str | None) -> dict[str, Any]:
    metadata = None if key is None else _value(row, key, "--metadata-key")
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(f"{key!r} (--metadata-key) must be an object, not {metadata!r:.80}")
    return dict(metadata or {})


def _tools(row: dict[str, Any], key: str | None) -> list[Any] | None:
    tools = None if key is None else _value(row, key, "--tool-key")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{key!r} (--tool-key) is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{key!r} (--tool-key) must be a list of tool definitions, not {tools!r:.80}")
    return tools or None
