"""Column `turns` of sample files: the conversation of an episode, one entry per message."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from fuligo.types import Episode, Messages, Sample, ToolUse, Turn

_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
_ENTRY = pa.struct(
    [
        ("turn", pa.int32()),
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("name", pa.string()),
        ("failed", pa.bool_()),
        ("seconds", pa.float64()),
        ("environment_s", pa.float64()),
        ("reward", pa.float64()),
        ("sample", pa.int32()),
        ("first_token", pa.int32()),
        ("num_tokens", pa.int32()),
    ]
)
TURNS = pa.list_(_ENTRY)
"""`turn`: number (1-based) of the answer that the message is, or that it follows; 0 before the first answer. `name`, `failed`: name of a
tool and whether its call failed. `seconds`: time to sample an answer or to run a tool. Only answers have a `reward`, `environment_s` (time
until the next answer was requested) and the position of their tokens: `response_ids[first_token : first_token + num_tokens]` of the
episode's sample number `sample`. Only the last sample of an unfinished episode is recorded; answers in its earlier samples have no
position."""


def turns_column(samples: Sequence[Sample], as_text: Callable[[Any], str | None]) -> pa.Array:
    """Return the column `turns`, null for samples without an episode. `as_text` returns a string as it is, and other values as JSON."""
    if not any(sample.episode for sample in samples):
        return pa.nulls(len(samples), TURNS)
    return pa.array([sample.episode and list(_entries(sample.episode, as_text)) for sample in samples], TURNS)


def _entries(episode: Episode, as_text: Callable[[Any], str | None]) -> Iterator[dict[str, Any]]:
    yield from (_entry(0, message, as_text) for message in episode.messages)
    for number, turn in enumerate(episode.turns, 1):
        sample = turn.sample - len(episode.branches)  # branches of an unfinished episode have no row
        yield _entry(number, turn.message, as_text) | {
            "seconds": turn.generate_s,
            "environment_s": turn.step_s,
            "reward": turn.reward,
            "sample": sample if sample >= 0 else None,
            "first_token": turn.first_token if sample >= 0 else None,
            "num_tokens": turn.num_tokens,
        }
        for message, use in _with_uses(turn):
            entry = _entry(number, message, as_text)
            yield entry if use is None else entry | {"name": as_text(use.name), "failed": use.failed, "seconds": use.seconds}


def _with_uses(turn: Turn) -> Iterator[tuple[dict[str, Any], ToolUse | None]]:
    """Yield the messages after an answer, each with the tool call that it is the result of, if any.

    If the environment rephrased the results, so that tool messages and calls differ in number, the original results come first.
    """
    results: Messages = [message for message in turn.answers if message.get("role") == "tool"]
    uses = iter(turn.tools)
    if len(results) != len(turn.tools):
        yield from (({"role": "tool", "content": use.result}, use) for use in uses)
    for message in turn.answers:
        yield message, next(uses, None) if message.get("role") == "tool" else None


def _entry(number: int, message: dict[str, Any], as_text: Callable[[Any], str | None]) -> dict[str, Any]:
    calls = [{"id": call.get("id"), **call["function"]} for call in message.get("tool_calls") or ()]  # an agent's ids may be numbers
    return {
        "turn": number,
        "role": as_text(message.get("role")),
        "content": as_text(message.get("content")),
        "reasoning": as_text(message.get("reasoning_content")),
        "tool_calls": [{name: as_text(call.get(name)) for name in ("id", "name", "arguments")} for call in calls],
        "name": as_text(message.get("name")),
    }
