"""Messages between the run and the process of an environment.

Requests are pickled, since a row may hold more than JSON. Replies are JSON: the run must not unpickle what an environment's process sent.
"""

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Literal, cast

import orjson

from fuligo.environments.environment import AssistantTurn, Row, Start, Step, Tool, ToolResult, start_problem, step_problem

HEADER = struct.Struct("<Q")
"""Header of a message: the length of its body in bytes."""
MAX_MESSAGE_BYTES = 1 << 30
CallName = Literal["reset", "restore", "step", "close", "cancel"]


class FailureError(Exception):
    """Raised if an environment fails; the text becomes the error of the sample."""


@dataclass(slots=True, frozen=True)
class Request:
    """Call of an environment."""

    number: int
    name: CallName
    row: Row | None = None
    """Row of the episode that begins, for `reset` and `restore`; None for other calls."""
    state: Any = None
    """State to continue from, for `restore`."""
    turn: AssistantTurn | None = None
    """Turn of the model, for `step`; None for other calls."""

    def encode(self) -> bytes:
        """Return the message with its header."""
        body = pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)
        return HEADER.pack(len(body)) + body


@dataclass(slots=True, frozen=True)
class Reply:
    """Result of a call."""

    number: int
    """Number of the request."""
    result: Mapping[str, Any]
    """JSON of a Start or Step; `is_reusable` after `close`; `pid` in the first reply; otherwise empty."""
    failure: str | None = None
    """Error of the call, which becomes the sample's error; None if the call succeeded."""
    state: Any = None
    """State after the call; None if the environment is not resumable, or the episode is over."""
    state_failure: str | None = None
    """Error of the environment's `state()`; None if it succeeded or was not called."""

    def encode(self) -> bytes:
        """Return the message with its header. Raises TypeError if the result is not JSON data."""
        try:
            body = orjson.dumps([self.number, self.result, self.failure, self.state, self.state_failure], option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError as error:
            raise TypeError(f"not JSON data: {error}") from None
        return HEADER.pack(len(body)) + body


def decode_reply(body: bytes) -> Reply:
    """Decode a reply. Raises FailureError if it is malformed."""
    try:
        number, result, failure, state, state_failure = orjson.loads(body)
    except (ValueError, TypeError):
        raise FailureError("its process sent an invalid message") from None
    texts_fit = all(text is None or isinstance(text, str) for text in (failure, state_failure))
    if not (isinstance(number, int) and isinstance(result, dict) and texts_fit):
        raise FailureError("its process sent an invalid message")
    return Reply(number, result, failure, state, state_failure)


def encode_start(start: Any) -> dict[str, Any]:
    """Return the result of `reset` as JSON data. Raises FailureError if it is invalid."""
    if (problem := start_problem(start)) is not None:
        raise FailureError(problem)
    return {"messages": start.messages, "tools": [[tool.name, tool.description, dict(tool.parameters)] for tool in start.tools]}


def decode_start(result: Mapping[str, Any]) -> Start:
    """Decode a Start. Raises FailureError if it is malformed."""
    try:
        return Start(result["messages"], tuple(Tool(name, description, parameters) for name, description, parameters in result["tools"]))
    except (KeyError, TypeError, ValueError):
        raise FailureError("its process sent an invalid message") from None


def encode_step(step: Any) -> dict[str, Any]:
    """Return the result of `step` as JSON data. Raises FailureError if it is invalid."""
    if (problem := step_problem(step)) is not None:
        raise FailureError(problem)
    return {
        "messages": step.messages,
        "reward": _number(step.reward),
        "done": bool(step.done),
        "metrics": {name: float(value) for name, value in step.metrics.items()},
        "tool_results": [[use.name, use.text, bool(use.failed), float(use.seconds)] for use in step.tool_results],
    }


def decode_step(result: Mapping[str, Any]) -> Step:
    """Decode a Step. Raises FailureError if it is malformed."""
    try:
        uses = tuple(ToolResult(name, text, failed, seconds) for name, text, failed, seconds in result["tool_results"])
        reward = result["reward"]
        if isinstance(reward, dict):
            reward = _Unfit(reward["text"])
        return Step(result["messages"], cast(float, reward), result["done"], result["metrics"], uses)
    except (KeyError, TypeError, ValueError):
        raise FailureError("its process sent an invalid message") from None


class _Unfit(str):
    """Reward that is not a finite number; its repr is that of the original value in the environment's process."""

    def __repr__(self) -> str:
        return str(self)


def _number(reward: Any) -> float | dict[str, str]:
    """Return a finite reward as a float, anything else as a dict with its repr."""
    try:
        value = reward.item() if hasattr(reward, "item") else reward
        if isinstance(value, Real) and isfinite(value):
            return float(value)
    except (OverflowError, ValueError, RuntimeError):  # an integer of hundreds of digits, an array of several numbers
        pass
    return {"text": f"{reward!r:.80}"}
