"""Tree of the turns sampled in one session, in which a request finds its place by the messages that it repeats."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import product
from typing import Any

import numpy as np
import orjson

from fuligo.engines.generation import FinishReason
from fuligo.environments.environment import Tool
from fuligo.types import FloatArray, IntArray, Messages, Span


@dataclass(slots=True, frozen=True)
class Sampled:
    """Tokens of one answer."""

    ids: IntArray
    """[R] token ids, including the end token or stop string."""
    logprobs: FloatArray
    """[R] log softmax(logits / T) over the full vocabulary."""
    versions: IntArray
    """[R] policy version of each token; an answer that a weight sync interrupted has several."""
    finish_reason: FinishReason
    spans: tuple[Span, ...] = ()
    """One per request to an engine; `first_token` counts from the beginning of the answer."""


@dataclass(slots=True, eq=False)
class Turn:
    """One answer and the tokens before it."""

    number: int
    """Position among the turns of the session."""
    parent: "Turn | None"
    """Turn whose tokens come before `context`; None if the conversation was rendered from its beginning."""
    messages: Messages
    """Conversation up to and including this answer, as it is rendered."""
    context: IntArray
    """[C] ids between the parent's answer and this one; the whole prompt without a parent."""
    sampled: Sampled
    has_children: bool = False

    def path(self) -> list["Turn"]:
        turns: list[Turn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def tokens(self) -> IntArray:
        """Return the ids of the conversation up to and including this answer."""
        return np.concatenate([part for turn in self.path() for part in (turn.context, turn.sampled.ids)])


@dataclass(slots=True, frozen=True)
class Place:
    """Place of a request in the tree."""

    parent: Turn | None
    """Last turn whose answer the request repeats (see `Conversation`); None if there is none."""
    new: Messages
    """Messages after that turn; all messages without one."""
    state: bytes
    """Digest of the tools, the turn and the new messages; equal for equal requests."""


@dataclass(eq=False)
class Conversation:
    """Turns of a session.

    A request continues the last of the session's answers that it repeats after the same messages and with the same tools. An assistant
    message repeats an answer if its tool calls are equal, and its content is equal except for leading and trailing white space, with or
    without the text from the stop string on, which the API cuts off, and with or without the reasoning, which many clients do not send
    back.
    """

    turns: list[Turn] = field(default_factory=list)
    """Turns in the order in which their answers were completed."""
    _known: dict[bytes, Turn] = field(default_factory=dict)
    """Turns by the digest of the messages up to and including their answer, for every accepted form of the answer."""

    def find(self, messages: Messages, tools: Sequence[Tool]) -> Place:
        """Find the longest known prefix of a request."""
        state = start = _digest(b"tools", orjson.dumps([tool.to_json() for tool in tools]))
        parent, num_known = None, 0
        for number, message in enumerate(messages, 1):
            state = _digest(state, _canonical(message))
            if message["role"] == "assistant" and (turn := self._known.get(state)) is not None:
                parent, num_known = turn, number
                state = _digest(start, b"turn %d" % turn.number)
        return Place(parent, messages[num_known:], state)

    def add(self, place: Place, turn: Turn, answer: dict[str, Any], stop: str = "") -> None:
        """Add the answer to the request at `place`, as it is returned; `stop` is the text that was stripped from its end."""
        content = answer.get("content") or ""
        for text, with_reasoning in product({content, content + stop}, (False, True)):
            spelling = {key: value for key, value in answer.items() if with_reasoning or key != "reasoning_content"} | {"content": text}
            self._known[_digest(place.state, _canonical(spelling))] = turn
        if turn.parent is not None:
            turn.parent.has_children = True
        self.turns.append(turn)

    def branches(self) -> Iterator[list[tuple[Turn, bool]]]:
        """Yield the path to every turn without children, as pairs (turn, True if no earlier path contains the turn)."""
        seen: set[int] = set()
        for turn in self.turns:
            if not turn.has_children:
                yield [(each, each.number not in seen) for each in turn.path()]
                seen.update(each.number for each in turn.path())


def _canonical(message: dict[str, Any]) -> bytes:
    """Return the parts of a message that the model sees, as bytes."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.strip()
    calls = [
        [call.get("id"), call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)]
        for call in message.get("tool_calls") or ()
    ]
    rest = [message.get(key) for key in ("name", "tool_call_id", "reasoning_content")]
    return orjson.dumps([message["role"], content, calls, *rest])


def _digest(state: bytes, more: bytes) -> bytes:
    return blake2b(state + more, digest_size=16).digest()
