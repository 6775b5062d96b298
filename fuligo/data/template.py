"""Text of chat messages, and token ids of text, as the tokenizer's own template and rules have them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fuligo.errors import ConfigError, DataError
from fuligo.types import IntArray, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OURS = frozenset({"tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"})


def no_chat_template(of: str) -> str:
    """
    Args:
        of: whose tokenizer has none.
    """
    return (
        f"--apply-chat-template: the tokenizer of {of} has no chat template: take a model that was trained to chat, put a template "
        "beside its tokenizer (chat_template.jinja), or leave the flag out and give prompts as text"
    )


class ChatTemplate:
    """The template of one tokenizer, with the arguments that the user added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> None:
        """Raises:
        ConfigError: the tokenizer has no template, or `kwargs` would change what is returned.
        """
        if not tokenizer.chat_template and "chat_template" not in kwargs:
            raise ConfigError(no_chat_template(tokenizer.name_or_path or "the model"))
        if reserved := _OURS & kwargs.keys():
            raise ConfigError(
                f"--apply-chat-template-kwargs: {', '.join(sorted(reserved))} cannot be set; only what the template itself reads"
            )
        self._tokenizer = tokenizer
        self._kwargs = kwargs

    def prompt(self, messages: Messages, tools: list[Any] | None = None) -> str:
        """The messages followed by what opens the assistant's turn."""
        return self._render(messages, tools, {"add_generation_prompt": True, **self._kwargs})

    def transcript(self, messages: Messages, tools: list[Any] | None = None) -> str:
        """The messages alone."""
        return self._render(messages, tools, {**self._kwargs, "add_generation_prompt": False})

    def masked_transcript(self, messages: Messages, tools: list[Any] | None = None) -> tuple[list[int], list[int]] | None:
        """Token ids and assistant mask of a template that marks assistant text with `{% generation %}`; None for one that does not."""
        template = str(self._kwargs.get("chat_template", self._tokenizer.chat_template))
        if _GENERATION_MARK.search(template) is None:
            return None
        arguments = {
            **self._kwargs,
            "add_generation_prompt": False,
            "tokenize": True,
            "return_dict": True,
            "return_assistant_tokens_mask": True,
        }
        encoded: Any = self._render(messages, tools, arguments)
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    def _render(self, messages: Messages, tools: list[Any] | None, arguments: dict[str, Any]) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **{"tokenize": False, **arguments})  # pyright: ignore[reportArgumentType]
        except Exception as error:  # a template raises whatever its author chose
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that a chat template made: its special tokens stand in the text already."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text without a template: begun by the beginning-of-text token where the tokenizer begins texts so, and only once."""
    ids = rendered_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    begins_with_bos = bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]  # pyright: ignore[reportArgumentType]
    return [bos, *ids] if begins_with_bos and ids[:1] != [bos] else ids  # pyright: ignore[reportReturnType]


def as_ids(ids: list[int]) -> IntArray:
    return np.asarray(ids, np.int32)
