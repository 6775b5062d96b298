"""Supervised data: whole conversations with a mask of the assistant's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from fuligo.data.dataset import Dataset
from fuligo.data.fields import Fields
from fuligo.data.source import RowSource
from fuligo.data.template import ChatTemplate, as_ids, plain_ids, rendered_ids
from fuligo.errors import DataError
from fuligo.types import IntArray, MaskArray, Messages, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segment = tuple[list[int], bool]
"""Token ids, and whether they are trained on."""


@dataclass(slots=True, frozen=True)
class Conversation:
    """One row of supervised data."""

    row: int
    prompt: str | Messages
    """Prompt of the row; chat messages include the assistant's turns."""
    tokens: IntArray
    """[T] token ids up to the last token that is trained on."""
    loss_mask: MaskArray
    """[T] 1 on the assistant's tokens, including the one that ends its turn."""
    label: Any
    metadata: dict[str, Any]

    def as_sample(self, index: int) -> Sample:
        """Return the conversation as a sample; its prompt is everything before the first trained token."""
        start = int(np.argmax(self.loss_mask))
        response = self.tokens[start:]
        return Sample(
            index=index,
            group_index=index,
            prompt=self.prompt,
            prompt_ids=self.tokens[:start],
            label=self.label,
            metadata=self.metadata,
            response_ids=response,
            loss_mask=self.loss_mask[start:],
            engine_logprobs=np.zeros(len(response), np.float32),
            versions=np.zeros(len(response), np.int32),
            status=SampleStatus.COMPLETED,
            reward=0.0,
        )


class ConversationDataset(Dataset[Conversation]):
    """Conversations of a file: chat messages with the assistant's turns, or prompt and answer if there is a label key.

    The length limit applies to the whole conversation.
    """

    def _make(self, row: int, fields: Fields) -> tuple[Conversation, int]:
        if isinstance(fields.prompt, str):
            segments = _plain_segments(fields, self._tokenizer)
        else:
            assert self._template is not None
            messages = fields.prompt
            if self.settings.label_key is not None:
                messages = [*messages, {"role": "assistant", "content": str(fields.label)}]
            segments = chat_segments(messages, fields.tools, self._template, self._tokenizer)
        tokens, mask = join_segments(segments)
        return Conversation(row, fields.prompt, tokens, mask, fields.label, fields.metadata), len(tokens)


class ConversationSource(RowSource[Conversation]):
    """Source of the conversations of a supervised run."""


def join_segments(segments: list[Segment]) -> tuple[IntArray, MaskArray]:
    """Return ([T] ids, [T] mask), cut after the last trained token.

    Raises:
        DataError: no token is trained on, or the first one is, which has no context
    """
    tokens = as_ids(list(chain.from_iterable(ids for ids, _ in segments)))
    mask = np.asarray([trained for ids, trained in segments for _ in ids], np.int8)
    trained_at = np.flatnonzero(mask)
    if len(trained_at) == 0:
        raise DataError("the conversation has no assistant turn to train on")
    if trained_at[0] == 0:
        raise DataError("the conversation begins with the assistant; its first token has no context to be predicted from")
    end = int(trained_at[-1]) + 1
    return tokens[:end], mask[:end]


def chat_segments(messages: Messages, tools: list[Any] | None, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    """Split a conversation where the assistant's turns begin and end.

    If the template marks assistant text itself (`{% generation %}`), its marks are used. Otherwise a turn is the text that the template
    adds between the messages before it, with the generation prompt, and the messages up to it. Both renderings must be prefixes of the
    whole conversation; the ids before a turn are then those of a rollout's prompt.

    Raises:
        DataError: the template renders earlier turns differently when later ones follow
    """
    if (marked := template.masked_transcript(messages, tools)) is not None:
        return [([token], bool(mask)) for token, mask in zip(*marked, strict=True)]
    whole = template.transcript(messages, tools)
    texts: list[tuple[str, bool]] = []
    position = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0:
            continue
        opened = template.prompt(messages[:turn], tools)
        closed = template.transcript(messages[: turn + 1], tools)
        if not (position <= len(opened) <= len(closed) and closed.startswith(opened) and whole.startswith(closed)):
            raise DataError(
                f"message {turn + 1} of {len(messages)}: cannot find the tokens of this assistant turn: the chat template renders it "
                "differently inside the whole conversation; use a template with {% generation %} marks, or one row per turn"
            )
        texts += [(whole[position : len(opened)], False), (whole[len(opened) : len(closed)], True)]
        position = len(closed)
    segments: list[Segment] = []
    for text, trained in texts:
        ids = rendered_ids(tokenizer, text)
        segments += _split_after_end_token(ids, tokenizer) if trained else [(ids, False)]
    _check_tokens(segments, whole[:position], tokenizer)
    return segments


def _split_after_end_token(turn: list[int], tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    """Split off the text after the token that ends the turn (a newline), which is never sampled and so not trained on."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)  # pyright: ignore[reportAttributeAccessIssue]
    ends = [position for position, token in enumerate(turn) if token in special]
    tail = turn[ends[-1] + 1 :] if ends else []
    if not tail or str(tokenizer.decode(tail)).strip():
        return [(turn, True)]
    return [(turn[: ends[-1] + 1], True), (tail, False)]


def _check_tokens(segments: list[Segment], text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that tokenizing piece by piece keeps the text (a tokenizer that prepends a space to every piece would not)."""
    pieces = list(chain.from_iterable(ids for ids, _ in segments))
    whole = rendered_ids(tokenizer, text)
    if pieces != whole and tokenizer.decode(pieces) != tokenizer.decode(whole):
        raise DataError(
            "cannot split the conversation: the tokenizer changes the text at an assistant turn; use a chat template with "
            "{% generation %} marks"
        )


def _plain_segments(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    if fields.label is None:
        raise DataError("a plain prompt has no answer to train on; give --label-key, or chat messages with --apply-chat-template")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-text token to end the answer")
    assert isinstance(fields.prompt, str)
    answer = rendered_ids(tokenizer, str(fields.label))
    return [(plain_ids(tokenizer, fields.prompt), False), ([*answer, int(tokenizer.eos_token_id)], True)]  # pyright: ignore[reportArgumentType]
