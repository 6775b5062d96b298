"""Environments in which the model calls tools, and tools made from typed functions."""

import asyncio
import inspect
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

from pydantic import ConfigDict, ValidationError, create_model

from fuligo.environments.environment import UNKNOWN_TOOL, AssistantTurn, Environment, Row, Start, Step, Tool, ToolCall, ToolResult
from fuligo.environments.threads import call_in_thread
from fuligo.quantities import count
from fuligo.types import Messages

MAX_RESULT_CHARS = 8_000
"""Longest tool result that the model reads; the rest is cut, and the result says so."""
MAX_NAME_CHARS = 100
"""Longest name of an unknown tool in the result of its call."""


class RunsTool(Protocol):
    """Tool with its implementation."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool and return its result for the model. An exception is reported to the model and counted as a failed call."""
        ...


class ToolFunction:
    """Tool made from a typed function; name, description and schema follow from its name, docstring and signature.

    A plain function runs in a separate thread, so that it may block; the thread of a call that never returns lasts until its process ends.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the signature. Raises TypeError if a parameter has no type annotation or cannot be passed by name (such as `*args`)."""
        self.name: str = function.__name__
        self.description = inspect.getdoc(function) or ""
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(
                    f"cannot make a tool of {self.name}: the parameter {parameter.name} cannot be passed by name; make it a keyword"
                )
            if parameter.annotation is parameter.empty:
                raise TypeError(f"cannot make a tool of {self.name}: the parameter {parameter.name} needs a type annotation; add it")
            fields[parameter.name] = (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        self._arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = self._arguments.model_json_schema()
        schema.pop("title", None)
        schema.pop("additionalProperties", None)
        for field in schema.get("properties", {}).values():
            field.pop("title", None)
        self.parameters: Mapping[str, Any] = schema
        self._function = function

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function and return its result as text. Raises ValueError if the arguments do not fit, or what the function raises."""
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors())
            raise ValueError(f"invalid arguments: {problems}") from None
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if inspect.iscoroutinefunction(self._function):
            return str(await self._function(**values))
        return str(await call_in_thread(partial(self._function, **values), self.name))


class ToolEnvironment(Environment):
    """Environment in which the model calls tools until it answers without a call; a subclass defines the task and judges the answer."""

    def __init__(self, row: Row, settings: Any, tools: Sequence[RunsTool | Callable[..., Any]] = ()) -> None:
        """Store the tools: objects with a method `call`, such as `McpTool`, or typed functions, such as `SearchTool.search`."""
        super().__init__(row, settings)
        runners = [cast(RunsTool, tool) if hasattr(tool, "call") else ToolFunction(cast(Callable[..., Any], tool)) for tool in tools]
        self._tools: dict[str, RunsTool] = {runner.name: runner for runner in runners}

    @abstractmethod
    async def judge(self, turn: AssistantTurn) -> Step:
        """Judge an answer without tool calls, or the last turn: return a reward with `done=True`, or messages to continue with."""

    def messages(self) -> Messages:
        """Return the first messages of the episode: the row's prompt, unless a subclass adds to it."""
        prompt = self.row.prompt
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def reset(self) -> Start:
        return Start(self.messages(), tuple(Tool(tool.name, tool.description, tool.parameters) for tool in self._tools.values()))

    async def step(self, turn: AssistantTurn) -> Step:
        """Run the calls of a turn concurrently and return their results in order; judge a turn that is the last or has no calls.

        If a call cannot be parsed, no call runs, and the model gets the reasons.
        """
        if turn.last or not (turn.tool_calls or turn.problems):
            return await self.judge(turn)
        if turn.problems:
            return Step([{"role": "tool", "content": f"error: {problem}"} for problem in turn.problems])
        results = tuple(await asyncio.gather(*(self._run(call) for call in turn.tool_calls)))
        messages: Messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(turn.tool_calls, results, strict=True)
        ]
        return Step(messages, tool_results=results)

    async def _run(self, call: ToolCall) -> ToolResult:
        start_s = time.monotonic()
        tool = self._tools.get(call.name)
        if tool is None:
            shown = call.name[:MAX_NAME_CHARS]
            return ToolResult(UNKNOWN_TOOL, f"error: there is no tool {shown}; the tools are {', '.join(self._tools)}", failed=True)
        try:
            text, failed = await tool.call(call.arguments), False
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a tool's SystemExit, raised in a task, would end the event loop
            text, failed = f"error: {_text(error) or type(error).__name__}", True
        if len(text) > MAX_RESULT_CHARS:
            text = f"{text[:MAX_RESULT_CHARS]}\n[{count(len(text) - MAX_RESULT_CHARS, 'more character')}]"
        return ToolResult(call.name, text, failed, time.monotonic() - start_s)


def _text(error: BaseException) -> str:
    """Return the text of an exception, empty if it has none."""
    try:
        return str(error)
    except Exception:
        return ""
