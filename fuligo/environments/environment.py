"""Interface of environments: objects with `reset` and `step`, one for every episode."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict

from fuligo.types import Messages


class EnvironmentSettings(BaseModel):
    """Settings of an environment, from --environment-settings; unknown names and wrong types are rejected before the run starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


UNKNOWN_TOOL = "unknown"
"""Name in results and metrics for any tool that the model called but was not offered."""


@dataclass(slots=True, frozen=True)
class Tool:
    """Tool that the model may call, as the chat template shows it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""

    def to_json(self) -> dict[str, Any]:
        """Return the definition in the format of OpenAI's API, which chat templates expect."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}}


@dataclass(slots=True, frozen=True)
class ToolCall:
    """Call of a tool, as parsed from a turn."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    """Id that the model wrote (Kimi K2), else nine letters and digits, a form that every chat template accepts."""

    def to_json(self) -> dict[str, Any]:
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(slots=True, frozen=True)
class AssistantTurn:
    """Turn of the model, parsed into content, thinking and tool calls."""

    content: str
    """Text without thinking and tool calls. If a call cannot be parsed, the text includes all calls."""
    reasoning: str | None = None
    """Thinking; None if there was none, empty if the model wrote an empty block."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls in order; empty if one of them cannot be parsed."""
    problems: tuple[str, ...] = ()
    """Reasons why tool calls cannot be parsed, phrased for the model."""
    num_tokens: int = 0
    """Tokens sampled, the end token included."""
    truncated: bool = False
    """True if a limit ended the turn, not the model."""
    last: bool = False
    """True if the model gets no further turn, because of --max-turns or because it has no tokens left."""

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        return message


@dataclass(slots=True, frozen=True)
class Row:
    """Row of the prompt file, for one episode."""

    prompt: str | Messages
    label: Any
    metadata: dict[str, Any]
    """Copy of the row's metadata, which the environment may change."""
    index: int
    """Number of the sample in the run, from 0."""


@dataclass(slots=True, frozen=True)
class Start:
    """Beginning of an episode."""

    messages: Messages
    tools: tuple[Tool, ...] = ()


@dataclass(slots=True, frozen=True)
class Step:
    """Answer of the environment to a turn of the model."""

    messages: Messages = field(default_factory=list)
    """Messages to append: tool results or the user's next turn. At least one unless `done`."""
    reward: float = 0.0
    """Reward of the turn; an episode's reward is the sum."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name; an episode reports the last value of each."""
    tool_results: tuple["ToolResult", ...] = ()
    """Outcomes of the tool calls, for metrics and the run's page."""


@dataclass(slots=True, frozen=True)
class ToolResult:
    """Outcome of one call of a tool."""

    name: str
    """Name of an offered tool, or `UNKNOWN_TOOL`: a name that the model made up must not become a metric."""
    text: str
    failed: bool = False
    seconds: float = 0.0


class Environment(ABC):
    """Environment of one episode. The run creates one per sample, `EnvironmentClass(row, settings)`, and closes it at the end.

    Each episode runs in a separate process, unless `isolated` is False, --environment-isolation is `none`, or other processes cannot run
    the class (`isolation.factory.is_isolated`). Without a separate process, the methods run on the event loop of the run: they must await
    anything that takes time, and move computation to `asyncio.to_thread`. A method that raises or takes longer than --turn-timeout-s fails
    only its own sample.
    """

    Settings: ClassVar[type[EnvironmentSettings]] = EnvironmentSettings
    """Pydantic model of --environment-settings; a subclass of `EnvironmentSettings` with typed fields."""
    resumable: ClassVar[bool] = False
    """True if `state` and `restore` let an interrupted episode continue; otherwise it starts over."""
    isolated: ClassVar[bool] = True
    """False if episodes share mutable objects, such as a match; all episodes then run in the process of the run."""

    def __init__(self, row: Row, settings: Any) -> None:
        self.row = row
        self.settings = settings

    @abstractmethod
    async def reset(self) -> Start:
        """Return the first messages and the tools."""

    @abstractmethod
    async def step(self, turn: AssistantTurn) -> Step:
        """Answer a turn of the model. After a turn with `last`, the episode ends with the reward so far."""

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release the episode's resources; called once, however the episode ends."""

    def state(self) -> Any:
        """Return JSON data from which `restore` continues the episode; called between steps if `resumable`."""
        raise NotImplementedError(f"cannot save an episode: {type(self).__name__} is resumable but has no state(); define it")

    async def restore(self, state: Any) -> None:
        """Continue from `state()`; called on a new object instead of `reset`."""
        raise NotImplementedError(f"cannot resume an episode: {type(self).__name__} is resumable but has no restore(); define it")


def environment_problem(kind: Any) -> str | None:
    """Return why an object cannot serve as an environment class, or None."""
    if not inspect.isclass(kind) or not issubclass(kind, Environment):
        return "it must be a class derived from fuligo.environments.Environment"
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        return f"the class lacks {', '.join(missing)}"
    for name in ("reset", "step", "close", "restore"):
        if not inspect.iscoroutinefunction(getattr(kind, name)):
            return f"{name} must be `async def`"
    if not (inspect.isclass(kind.Settings) and issubclass(kind.Settings, EnvironmentSettings)):
        return "Settings must be a class derived from fuligo.environments.EnvironmentSettings"
    if kind.resumable and (lacking := [name for name in ("state", "restore") if getattr(kind, name) is getattr(Environment, name)]):
        return f"the class is resumable but lacks {', '.join(lacking)}"
    try:
        inspect.signature(kind).bind("row", "settings")
    except TypeError as error:
        return f"it is called as (row, settings), but its signature is {inspect.signature(kind)}: {error}"
    return None


def start_problem(start: Any) -> str | None:
    """Return why the result of `reset` is invalid, or None."""
    if not isinstance(start, Start) or not start.messages:
        return f"reset must return a Start with messages, not {start!r:.100}"
    if (problem := _messages_problem(start.messages)) is not None:
        return f"the messages of reset {problem}"
    if not isinstance(start.tools, Sequence) or not all(isinstance(tool, Tool) for tool in start.tools):
        return f"the tools of reset must be a tuple of Tool, not {start.tools!r:.100}"
    return None


def step_problem(step: Any) -> str | None:
    """Return why the result of `step` is invalid, or None. The reward is not checked."""
    if not isinstance(step, Step):
        return f"step must return a Step, not {step!r:.100}"
    if (problem := _messages_problem(step.messages)) is not None:
        return f"the messages of step {problem}"
    if not isinstance(step.metrics, Mapping) or not all(map(_is_metric, step.metrics.items())):
        return f"the metrics of step must be finite numbers by name, not {step.metrics!r:.100}"
    if not isinstance(step.tool_results, Sequence) or not all(isinstance(result, ToolResult) for result in step.tool_results):
        return f"the tool_results of step must be a tuple of ToolResult, not {step.tool_results!r:.100}"
    return None


def _messages_problem(messages: Any) -> str | None:
    if isinstance(messages, (list, tuple)) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        return None
    return f"must be a list of dicts with a role, not {messages!r:.100}"


def _is_metric(item: tuple[Any, Any]) -> bool:
    name, value = item
    try:
        return isinstance(name, str) and isfinite(value)
    except (TypeError, OverflowError, ValueError):
        return False


def describe_error(error: BaseException) -> str:
    """Describe an exception of the environment, by its type alone if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def json_copy(value: Any) -> Any:
    """Return a deep copy of JSON data, with NumPy values as numbers and lists. Raises TypeError if `value` holds anything else."""
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    except orjson.JSONEncodeError as error:
        raise TypeError(f"not JSON data: {error}") from error
