"""Fields of a row, read by the configured keys and checked."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.config.groups import DataFlags
from fuligo.data.images import PLACEHOLDER, check_placeholders, read_images
from fuligo.errors import DataError
from fuligo.types import Messages, RawImage


@dataclass(slots=True, frozen=True)
class Fields:
    """Content of one row before tokenization."""

    prompt: str | Messages
    label: Any
    metadata: dict[str, Any]
    tools: list[Any] | None
    """Tool definitions for the chat template; None without --tool-key, or if the row has none."""
    images: tuple[RawImage, ...] = ()


def read_fields(row: dict[str, Any], settings: DataFlags, place: Callable[[], str], directory: Path) -> Fields:
    """Read the fields of a row; paths of images are relative to `directory`.

    Raises DataError if a key is missing or its value is invalid; `place` is called only then and returns the file and line.
    """
    try:
        _check_keys(row, settings)
        tools = _tools(row, settings.tool_key)
        metadata = _metadata(row, settings.metadata_key)
        label = None if settings.label_key is None else row[settings.label_key]
        if label is None and settings.label_key is not None:
            raise DataError(f"{settings.label_key!r} (--label-key) is null; add a label or remove the row")
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


def _check_keys(row: dict[str, Any], settings: DataFlags) -> None:
    """Raise DataError with all keys that the flags name and the row lacks."""
    keys = {
        "--input-key": settings.input_key,
        "--label-key": settings.label_key,
        "--metadata-key": settings.metadata_key,
        "--tool-key": settings.tool_key,
        "--multimodal-keys": settings.image_key,
    }
    if missing := [f"{key!r} ({flag})" for flag, key in keys.items() if key is not None and key not in row]:
        raise DataError(f"no key {', '.join(missing)}; the row has {', '.join(map(repr, row)) or 'none'}")


def _prompt(row: dict[str, Any], settings: DataFlags) -> str | Messages:
    key = settings.input_key
    prompt = row[key]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{key!r} is an empty string; remove the row")
        return [{"role": "user", "content": prompt}] if settings.apply_chat_template else prompt
    messages = check_messages(prompt, key, has_images=settings.image_key is not None)
    if not settings.apply_chat_template:
        raise DataError(f"{key!r} holds chat messages; use --apply-chat-template to render them with the tokenizer's template")
    return messages


def _images(row: dict[str, Any], settings: DataFlags, prompt: str | Messages, directory: Path) -> tuple[RawImage, ...]:
    if settings.image_key is None or isinstance(prompt, str):
        return ()
    images = read_images(row[settings.image_key], settings.image_key, directory)
    check_placeholders(prompt, len(images), settings.image_key)
    return images


def check_messages(value: Any, key: str, *, has_images: bool = False) -> Messages:
    """Return chat messages without their null fields, except `content` (columnar files fill missing fields with null).

    With `has_images`, image parts become placeholders. Raises DataError if `value` is not a list of messages with a role and content.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} must be a string or a list of chat messages, not {value!r:.80}")
    messages: Messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{key!r}: a chat message is {{"role": ..., "content": ...}}, not {message!r:.80}')
        kept = {name: part for name, part in message.items() if part is not None or name == "content"}
        if kept.get("content") is None and not kept.get("tool_calls"):
            raise DataError(f"{key!r}: the {message['role']} message has no content; add it or remove the row")
        if kept.get("content") is not None:
            kept["content"] = _text(kept["content"], f"{key!r}: the content of the {message['role']} message", has_images)
        messages.append(kept)
    return messages


def _text(content: Any, name: str, has_images: bool) -> str:
    """Join the text parts of a message, because many chat templates silently drop content that is not a string.

    Raises DataError if a part is not text. With `has_images`, images become placeholders.
    """
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if has_images:
        parts = [{"type": "text", "text": PLACEHOLDER} if _is_image(part) else part for part in parts]
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise DataError(f'{name} must be text, or a list of {{"type": "text", "text": ...}}, not {content!r:.80}')
    return "".join(part["text"] for part in parts)


def _is_image(part: Any) -> bool:
    """Return whether a message part stands for an image of the row's image column, rather than holding an image itself."""
    return isinstance(part, dict) and part.get("type") == "image" and all(value is None for key, value in part.items() if key != "type")


def _metadata(row: dict[str, Any], key: str | None) -> dict[str, Any]:
    metadata = None if key is None else row[key]
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(f"{key!r} (--metadata-key) must be an object, not {metadata!r:.80}")
    return dict(metadata or {})


def _tools(row: dict[str, Any], key: str | None) -> list[Any] | None:
    tools = None if key is None else row[key]
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{key!r} (--tool-key) is not JSON ({error}); correct the row") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{key!r} (--tool-key) must be a list of tool definitions, not {tools!r:.80}")
    return tools or None
