"""Sources of a sample's tokens: its messages, the chat template, the policy, and the texts of tools and users between its turns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SAMPLED, APPENDED, TEMPLATE = "sampled", "appended", "template"
Source = Literal["sampled", "appended", "template"]
"""Origin of a token: the policy, the text of a tool or user in a later turn, or the chat template around that text."""
_ROLE = r"(?:system|developer|user|assistant|model|tool|ipython|observation|function|environment)"
_BETWEEN = re.compile(rf"\s*{_ROLE}?\s*")
"""Text between two markers that is not a message: a role's name, or space."""
_HEADER = re.compile(rf"{_ROLE}\n+|\s+")
"""Beginning of a text after a marker that the template wrote: `tool\\n`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a prompt."""

    source: Literal["message", "template"]
    name: str
    """Role of the message, or `template`."""
    text: str


def prompt_segments(rendered: str | None, messages: Sequence[tuple[str, str]]) -> list[Segment]:
    """Divide a rendered prompt into its messages and the text that the chat template put around them, in order.

    A template may rewrite a message, or remove it; text that is not found in the messages belongs to the template.

    Args:
        rendered: text of the prompt's tokens; None without a tokenizer.
        messages: role and text of each.
    """
    whole = [Segment("message", role, text) for role, text in messages]
    if not rendered:
        return whole
    found: list[Segment] = []
    at = 0
    for role, text in messages:
        for wording in (text, text.strip()):
            start = rendered.find(wording, at) if wording else -1
            if start >= 0:
                found += [Segment("template", TEMPLATE, rendered[at:start])] if start > at else []
                found.append(Segment("message", role, wording))
                at = start + len(wording)
                break
    if at < len(rendered):
        found.append(Segment("template", TEMPLATE, rendered[at:]))
    return found


def token_sources(
    texts: Sequence[str] | None, markers: Sequence[bool], sampled: Sequence[bool], loss_mask: Sequence[int] | None
) -> list[Source]:
    """Return the source of each token of a response.

    Between sampled turns, markers belong to the template, and so do a role's name and the space next to them.

    Args:
        texts: text of each token; None without a tokenizer, in which case tokens of the template count as appended.
        markers: True for special tokens of the chat template, such as <|im_start|> and <tool_response>.
        sampled: True for tokens that an engine is known to have sampled.
        loss_mask: 1 on trained tokens, which are sampled in any case.
    """
    trained = loss_mask or [0] * len(sampled)
    sources: list[Source] = [SAMPLED if by_engine or mask else APPENDED for by_engine, mask in zip(sampled, trained, strict=True)]
    if texts is None:
        return sources
    start = 0
    while start < len(sources):
        if sources[start] != APPENDED:
            start += 1
            continue
        end = next((at for at in range(start, len(sources)) if sources[at] != APPENDED), len(sources))
        for at in _of_template(texts, markers, start, end):
            sources[at] = TEMPLATE
        start = end
    return sources


def _of_template(texts: Sequence[str], markers: Sequence[bool], start: int, end: int) -> list[int]:
    """Return the positions of the tokens from `start` to `end`, all appended, that the template wrote."""
    marks = [at for at in range(start, end) if markers[at]]
    found = list(marks)
    for mark, following in zip(marks, [*marks[1:], end], strict=False):
        text = "".join(texts[mark + 1 : following])
        is_between = following < end or end < len(texts)
        header = text if is_between and _BETWEEN.fullmatch(text) else (match[0] if (match := _HEADER.match(text)) else "")
        at, length = mark + 1, 0
        while at < following and length + len(texts[at]) <= len(header) and (texts[at] or length < len(header)):
            found.append(at)
            length += len(texts[at])
            at += 1
    return found


def sampled_tokens(num_tokens: int, spans: Sequence[dict], engine_logprobs: Sequence[float] | None) -> list[bool]:
    """Return which tokens an engine sampled: by the recorded requests, else by log-probability, which is 0 for appended tokens."""
    if known := [span for span in spans if span.get("num_tokens")]:
        covered = [False] * num_tokens
        for span in known:
            first = span["first_token"]
            covered[first : first + span["num_tokens"]] = [True] * max(0, min(span["num_tokens"], num_tokens - first))
        return covered
    return [value != 0 for value in engine_logprobs] if engine_logprobs else [True] * num_tokens
