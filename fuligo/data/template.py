"""Rendering of chat messages with the tokenizer's template, and tokenization of text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fuligo.errors import ConfigError, DataError
from fuligo.types import IntArray, Messages

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESERVED = frozenset({"tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"})


class Decodes(Protocol):
    """Tokenizer that turns ids into text."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


def no_chat_template(model: str) -> str:
    """Return the error for a model whose tokenizer has no chat template."""
    return (
        f"--apply-chat-template: the tokenizer of {model} has no chat template; use a chat model, add a template next to its tokenizer "
        "(chat_template.jinja), or remove the flag and write prompts as text"
    )


class ChatTemplate:
    """Chat template of a tokenizer, with the user's arguments. Rendering raises DataError if the template rejects the messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> None:
        """Check template and arguments. Raises ConfigError if there is no template, or `kwargs` sets an argument in `_RESERVED`."""
        if not tokenizer.chat_template and "chat_template" not in kwargs:
            raise ConfigError(no_chat_template(tokenizer.name_or_path or "the model"))
        if reserved := _RESERVED & kwargs.keys():
            raise ConfigError(
                f"--apply-chat-template-kwargs: {', '.join(sorted(reserved))} cannot be set; only variables of the template can"
            )
        self._tokenizer = tokenizer
        self._kwargs = kwargs

    @property
    def source(self) -> str:
        """Jinja source of the template."""
        return str(self._kwargs.get("chat_template", self._tokenizer.chat_template))

    def prompt(self, messages: Messages, tools: list[Any] | None = None) -> str:
        """Render the messages with the generation prompt."""
        return self._render(messages, tools, {"add_generation_prompt": True, **self._kwargs})

    def transcript(self, messages: Messages, tools: list[Any] | None = None) -> str:
        """Render the messages without the generation prompt."""
        return self._render(messages, tools, {**self._kwargs, "add_generation_prompt": False})

    def masked_transcript(self, messages: Messages, tools: list[Any] | None = None) -> tuple[list[int], list[int]] | None:
        """Return token ids and assistant mask; None if the template does not mark assistant text with `{% generation %}`."""
        if _GENERATION_MARK.search(self.source) is None:
            return None
        own = dict.fromkeys(("tokenize", "return_dict", "return_assistant_tokens_mask"), True)
        encoded: Any = self._render(messages, tools, {**self._kwargs, "add_generation_prompt": False, **own})
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    def _render(self, messages: Messages, tools: list[Any] | None, arguments: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"tokenize": False, **arguments}
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # a template may raise any exception
            raise DataError(f"the chat template rejects the messages: {type(error).__name__}: {error}") from error


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize text from a chat template, which already contains its special tokens."""
    backend = _backend(tokenizer, "_encode_plus")
    # An earlier call may have left truncation, padding or another mode set in the backend; calling the tokenizer itself resets them.
    if (
        backend is not None
        and backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    ):
        return backend.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return a function that decodes ids to their text, including special tokens."""
    if (backend := _backend(tokenizer, "_decode")) is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def response_decoder(tokenizer: Decodes) -> Callable[[list[int]], str]:
    """Return a function that decodes the ids of a response, without special tokens, and cleaned up if the tokenizer does so."""
    backend = _backend(tokenizer, "_decode")
    if backend is not None and not _cleans_up(tokenizer, backend):
        return lambda ids: backend.decode(ids, skip_special_tokens=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _cleans_up(tokenizer: Decodes, backend: Tokenizer) -> bool:
    """Return whether decoding removes spaces before punctuation; for BPE, transformers does so only if a second setting is on."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    for_bpe = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(for_bpe) or type(backend.model).__name__ != "BPE"


def _backend(tokenizer: Decodes, method: str) -> Tokenizer | None:
    """Return the Rust tokenizer of a fast tokenizer, which is quicker to call, because transformers checks and converts every id.

    Return None if there is none, or the tokenizer overrides transformers' `method`, which may then do more than call the Rust tokenizer.
    """
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerFast) and getattr(type(tokenizer), method) is getattr(PreTrainedTokenizerFast, method):
        return tokenizer.backend_tokenizer
    return None


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize text without a template, with one beginning-of-text token if the tokenizer adds it."""
    ids = rendered_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    begins_with_bos = bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]
    return [bos, *ids] if begins_with_bos and ids[:1] != [bos] else ids


def as_ids(ids: list[int]) -> IntArray:
    return np.asarray(ids, np.int32)
