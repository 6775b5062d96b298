"""Tokens of the assistant's turns in a conversation that a chat template renders."""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from fuligo.data.template import ChatTemplate, rendered_ids
from fuligo.errors import DataError
from fuligo.types import Messages

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Segment = tuple[list[int], bool]
"""Token ids, and whether they are trained on."""
RewrittenTurns = Literal["per-turn", "rendered", "refuse"]
_STAND_IN = "\u2063a stand-in\u2063"
"""Placeholder content that no message begins or ends with."""


@dataclass(eq=False)
class AssistantTurns:
    """Assistant turns of one conversation.

    If the template marks assistant text itself (`{% generation %}`), its marks are used. Otherwise a turn is the difference between two
    renderings: the messages before the turn with the generation prompt, and the messages up to and including the turn. The ids before a
    turn are then the same as in the prompt of a rollout.
    """

    messages: Messages
    tools: list[Any] | None
    template: ChatTemplate
    tokenizer: "PreTrainedTokenizerBase"
    end_ids: frozenset[int] = frozenset()
    """Tokens at which the model stops; they include the next role's token if the template does not mark ends of turns (GLM)."""

    def __post_init__(self) -> None:
        self._turns = [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant" and turn > 0]

    def sequences(self, rewritten: RewrittenTurns) -> list[list[Segment]]:
        """Return the sequences to train on: one of the whole conversation, or several if the template rewrites earlier turns.

        If the template renders earlier turns differently once later ones follow, `per-turn` trains each turn in its own sequence, as the
        model writes it, and `rendered` trains the form that the whole conversation shows. Raises DataError if the template
        rewrites a turn and `rewritten` is `refuse`, or if the tokens of a turn cannot be found.
        """
        if (marked := self._marked()) is not None:
            return [marked]
        spans = [self._span(turn) for turn in self._turns]
        whole = self.template.transcript(self.messages, self.tools)
        rewriting = self._rewritten_turn(whole, spans)
        if rewriting is not None and rewritten == "rendered":
            return [self._segments(whole, self._rendered_spans(whole, spans), self._turns[-1:])]
        self._check_continued(spans)
        if rewriting is None:
            return [self._segments(whole, [(len(opened), len(closed)) for opened, closed in spans], self._turns[-1:])]
        if rewritten == "refuse":
            raise DataError(
                f"message {rewriting + 1} of {len(self.messages)}: the chat template renders this assistant turn differently inside the "
                "whole conversation; choose how to train it with --sft-rewritten-turns, or use a template with {% generation %} marks"
            )
        return [
            self._segments(closed, [(len(opened), len(closed))], [turn]) for turn, (opened, closed) in zip(self._turns, spans, strict=True)
        ]

    def _span(self, turn: int) -> tuple[str, str]:
        """Return two renderings: the messages before a turn with the generation prompt, and the conversation up to the end of the turn."""
        opened = self.template.prompt(self.messages[:turn], self.tools)
        closed = self.template.transcript(self.messages[: turn + 1], self.tools)
        if closed.startswith(opened):
            return opened, closed
        # The template drops the thinking that the generation prompt opens even from the last turn (DeepSeek-R1).
        message = self.messages[turn]
        before, found, after = self.template.transcript([*self.messages[:turn], {**message, "content": _STAND_IN}], self.tools).partition(
            _STAND_IN
        )
        written = f"{before}{message.get('content')}{after}"
        return opened, written if found and written.startswith(opened) else closed

    def _check_continued(self, spans: list[tuple[str, str]]) -> None:
        """Check that every turn continues its generation prompt. Raises DataError if a turn does not."""
        for turn, (opened, closed) in zip(self._turns, spans, strict=True):
            if not closed.startswith(opened):
                raise DataError(
                    f"message {turn + 1} of {len(self.messages)}: cannot find the tokens of this assistant turn: the chat template does "
                    "not continue its generation prompt with it; give the turn the thinking that the prompt opens, choose "
                    "--sft-rewritten-turns rendered, or use a template with {% generation %} marks"
                )

    def _rewritten_turn(self, whole: str, spans: list[tuple[str, str]]) -> int | None:
        """Return the message number, from 0, of the first turn that is rendered differently in the whole conversation; None without one."""
        position = 0
        for turn, (opened, closed) in zip(self._turns, spans, strict=True):
            if position > len(opened) or not whole.startswith(closed) or not closed.startswith(opened):
                return turn
            position = len(closed)
        return None

    def _rendered_spans(self, whole: str, turns: list[tuple[str, str]]) -> list[tuple[int, int]]:
        """Return the span of each turn in the whole conversation: the text that depends on its content, and its end token."""
        spans: list[tuple[int, int]] = []
        for turn, (_, closed) in zip(self._turns, turns, strict=True):
            if self.messages[turn].get("tool_calls"):
                raise DataError(
                    f"message {turn + 1} of {len(self.messages)}: --sft-rewritten-turns rendered cannot find the tokens of a turn with "
                    "tool calls; use per-turn"
                )
            other = [*self.messages[:turn], {**self.messages[turn], "content": _STAND_IN}, *self.messages[turn + 1 :]]
            changed = self.template.transcript(other, self.tools)
            start = _num_equal(whole, changed)
            end = len(whole) - _num_equal(whole[start:][::-1], changed[start:][::-1])
            special = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
            after = [text for text in special if whole.startswith(text, end) and closed.rstrip().endswith(text)]
            spans.append((start, end + max(map(len, after), default=0)))
        return spans

    def _segments(self, text: str, spans: list[tuple[int, int]], last: list[int]) -> list[Segment]:
        """Tokenize a rendering piece by piece; the turns are trained, each with the token that ends it.

        `spans` are the turns' positions [start, end) in characters, `last` the message number of the last turn, empty without turns.
        """
        segments: list[Segment] = []
        position = 0
        for start, end in spans:
            segments += [(self._ids(text[position:start]), False), *self._without_tail(self._ids(text[start:end]))]
            position = end
        self._check_tokens(segments, text[:position])
        rest = self._ids(text[position:]) or (self._reply(last[0]) if last else [])
        return self._with_ends([*segments, (rest, False)])

    def _with_ends(self, segments: list[Segment]) -> list[Segment]:
        """Return the segments, with the token after a turn trained too if the model stops at it and the turn has no such token itself."""
        segments = [segment for segment in segments if segment[0]]
        done: list[Segment] = []
        for number, (ids, trained) in enumerate(segments):
            before = segments[number - 1] if number else ([], False)
            if not trained and before[1] and before[0][-1] not in self.end_ids and ids[0] in self.end_ids:
                done += [(ids[:1], True), (ids[1:], False)]
            else:
                done.append((ids, trained))
        return done

    def _reply(self, turn: int) -> list[int]:
        """Return the first id that the template writes after a turn when an answer to it follows.

        Empty if the template rejects the answer or renders the turn differently before it, or `end_ids` is empty.
        The turn is rendered alone and without thinking, because many templates drop all earlier thinking once the user answers.
        """
        if not self.end_ids:
            return []
        calls = self.messages[turn].get("tool_calls")
        question, answer = {"role": "user", "content": _STAND_IN}, {"role": "tool" if calls else "user", "content": _STAND_IN}
        said = {"role": "assistant", "content": _STAND_IN, **({"tool_calls": calls} if calls else {})}
        try:
            shorter, longer = (self.template.transcript([question, said, *more], self.tools) for more in ([], [answer]))
        except DataError:  # the template allows no such message there
            return []
        return self._ids(longer[len(shorter) :])[:1] if longer.startswith(shorter) else []

    def _marked(self) -> list[Segment] | None:
        """Return the segments that the template marks itself; None if it has no marks."""
        marked = self.template.masked_transcript(self.messages, self.tools)
        if marked is None:
            return None
        segments: list[Segment] = []
        for token, mask in zip(*marked, strict=True):
            if not segments or segments[-1][1] != bool(mask):
                segments.append(([], bool(mask)))
            segments[-1][0].append(token)
        if self._turns and segments[-1][1]:
            segments.append((self._reply(self._turns[-1]), False))
        return self._with_ends(segments)

    def _ids(self, text: str) -> list[int]:
        return rendered_ids(self.tokenizer, text) if text else []

    def _without_tail(self, turn: list[int]) -> list[Segment]:
        """Split off the text after the token that ends the turn (a newline), which is never sampled and so not trained on."""
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        ends = [position for position, token in enumerate(turn) if token in special]
        tail = turn[ends[-1] + 1 :] if ends else []
        if not tail or str(self.tokenizer.decode(tail)).strip():
            return [(turn, True)]
        return [(turn[: ends[-1] + 1], True), (tail, False)]

    def _check_tokens(self, segments: list[Segment], text: str) -> None:
        """Raise DataError if tokenizing piece by piece changes the text (a tokenizer may prepend a space to every piece)."""
        pieces = list(chain.from_iterable(ids for ids, _ in segments))
        whole = rendered_ids(self.tokenizer, text)
        if pieces != whole and self.tokenizer.decode(pieces) != self.tokenizer.decode(whole):
            raise DataError(
                "cannot split the conversation: the tokenizer changes the text at an assistant turn; use a chat template with "
                "{% generation %} marks"
            )


def _num_equal(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    differing = (position for position, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, min(len(first), len(second)))
