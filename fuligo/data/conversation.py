"""Supervised data: whole conversations with a mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from fuligo.data.assistant_turns import AssistantTurns, Segment
from fuligo.data.dataset import Dataset
from fuligo.data.fields import Fields
from fuligo.data.source import RowSource
from fuligo.data.template import as_ids, plain_ids, rendered_ids
from fuligo.errors import DataError
from fuligo.types import IntArray, MaskArray, Messages, PromptImage, RawImage, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(slots=True, frozen=True)
class MaskedTokens:
    """One sequence to train on."""

    tokens: IntArray
    """[T] token ids up to the last token that is trained on."""
    loss_mask: MaskArray
    """[T] 1 on the assistant's tokens, including the one that ends its turn."""
    images: tuple[PromptImage, ...] = ()
    """Images, in the order of their tokens."""


@dataclass(slots=True, frozen=True)
class Conversation:
    """One row of supervised data."""

    row: int
    prompt: str | Messages
    """Prompt of the row; chat messages include the assistant's turns, except an answer under --label-key."""
    parts: tuple[MaskedTokens, ...]
    """One sequence for the whole conversation, or one for each assistant turn if the template rewrites earlier turns."""
    label: Any
    metadata: dict[str, Any]

    @property
    def images(self) -> tuple[PromptImage, ...]:
        return tuple(image for part in self.parts for image in part.images)

    def as_samples(self, index: int) -> list[Sample]:
        """Return the parts as samples of one trajectory; the prompt of each is everything before its first trained token."""
        samples: list[Sample] = []
        for part in self.parts:
            start = int(np.argmax(part.loss_mask))
            sample = Sample(index, index, self.prompt, part.tokens[:start], self.label, self.metadata, part.images)
            sample.response_ids, sample.loss_mask = part.tokens[start:], part.loss_mask[start:]
            sample.engine_logprobs = np.zeros(sample.response_length, np.float32)
            sample.versions = np.zeros(sample.response_length, np.int32)
            sample.status, sample.reward = SampleStatus.COMPLETED, 0.0
            samples.append(sample)
        return samples


class ConversationDataset(Dataset[Conversation]):
    """Conversations of a file: chat messages with the assistant's turns, or prompt and answer if there is a label key.

    The length limit applies to the whole conversation.
    """

    def _make(self, row: int, fields: Fields) -> tuple[Conversation, int]:
        if isinstance(fields.prompt, str):
            sequences = [_plain_segments(fields, self.tokenizer)]
        else:
            assert self._template is not None
            messages = fields.prompt
            if self.settings.label_key is not None:
                messages = [*messages, {"role": "assistant", "content": str(fields.label)}]
            turns = AssistantTurns(self._with_images(messages), fields.tools, self._template, self.tokenizer, self.end_ids)
            sequences = turns.sequences(self.settings.sft_rewritten_turns)
        parts = tuple(self._place(join_segments(segments), fields.images) for segments in sequences)
        longest = max(len(part.tokens) for part in parts)
        return Conversation(row, fields.prompt, parts, fields.label, fields.metadata), longest

    def _place(self, part: MaskedTokens, images: Sequence[RawImage]) -> MaskedTokens:
        """Insert all tokens of a sequence's images. A sequence is cut after its last trained token and may lack the last images."""
        if not images:
            return part
        assert self.images is not None, "opened with the model's images"
        ids = part.tokens.tolist()
        placed = self.images.place(ids, images[: ids.count(self.images.token_id)])
        return MaskedTokens(placed.ids, part.loss_mask[placed.origins], placed.images)


class ConversationSource(RowSource[Conversation]):
    """Source of the conversations of a supervised run."""


def join_segments(segments: list[Segment]) -> MaskedTokens:
    """Join the segments of a sequence, and cut it after the last trained token.

    Raises DataError if no token is trained, or the first one is, which has no context.
    """
    tokens = as_ids(list(chain.from_iterable(ids for ids, _ in segments)))
    mask = np.asarray([trained for ids, trained in segments for _ in ids], np.int8)
    trained_at = np.flatnonzero(mask)
    if len(trained_at) == 0:
        raise DataError("the conversation has no assistant turn to train on; add one or remove the row")
    if trained_at[0] == 0:
        raise DataError("the conversation begins with the assistant, whose first token has no context; add a message before it")
    end = int(trained_at[-1]) + 1
    return MaskedTokens(tokens[:end], mask[:end])


def _plain_segments(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    if fields.label is None:
        raise DataError("a plain prompt has no answer to train on; use --label-key, or chat messages with --apply-chat-template")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-text token to end the answer; use chat messages with --apply-chat-template")
    assert isinstance(fields.prompt, str)
    answer = rendered_ids(tokenizer, str(fields.label))
    return [(plain_ids(tokenizer, fields.prompt), False), ([*answer, int(tokenizer.eos_token_id)], True)]
