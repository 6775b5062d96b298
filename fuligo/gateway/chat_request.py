"""Chat completion requests of agents, and their checks: parameters that training cannot honor are rejected by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuligo.data.fields import check_messages
from fuligo.engines.generation import FIELD_RULES, SamplingParams
from fuligo.engines.openai_format import InvalidRequest, given_max_tokens
from fuligo.environments.environment import Tool
from fuligo.errors import DataError
from fuligo.types import Messages

_READ = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "logprobs"}
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "seed"}
"""Parameters that are accepted and ignored, `seed` because the run derives the seeds."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "functions": ([],),
    "echo": (False,),
}
"""Parameters that are accepted only with these values, or null."""
_SHAPING = ("temperature", "top_p", "top_k", "min_p")
"""Parameters that shape the distribution, and fields of `SamplingParams`."""
_NO_PENALTY = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Parameters that shape the distribution but that rollouts do not have, with the values that have no effect."""
_MAX_STOPS = 16


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """One request of an agent."""

    messages: Messages
    """Messages in the form that the renderer expects: content is text; arguments of a tool call are an object, or text that is not
    a JSON object."""
    tools: tuple[Tool, ...]
    params: SamplingParams
    num_replaced: int
    """Number of the request's parameters that were replaced by the rollout's."""
    model: str | None
    """Model that the request names, which the answer repeats; None if it names none."""
    stream: bool
    with_usage: bool
    """True to send the usage at the end of a stream."""
    with_logprobs: bool


def parse_chat_request(body: Mapping[str, Any], rollout: SamplingParams, *, replaces: bool) -> ChatRequest:
    """Check a request. Raises InvalidRequest if the body is malformed, or asks for something that cannot be trained on.

    Args:
        body: request to `/v1/chat/completions`; requests to other APIs are translated to one
        rollout: sampling parameters of the rollout; `max_new_tokens` limits an answer
        replaces: use the rollout's parameters where the request's differ, instead of rejecting the request
    """
    params, num_replaced = _params(body, rollout, replaces)
    for name, value in body.items():
        if name in _READ or name in _IGNORED or name in _SHAPING or name in _NO_PENALTY or value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name == "tool_choice" and replaces:
            num_replaced += 1
            continue
        raise InvalidRequest(
            f"{name}={value!r:.80} is not supported: the gateway returns every answer exactly as it was sampled; leave {name} out", name
        )
    model = body.get("model")
    if not isinstance(model, str | None):
        raise InvalidRequest(f"model is {model!r:.80}; it must be a string", "model")
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=() if body.get("tool_choice") == "none" else _tools(body.get("tools") or []),
        params=params,
        num_replaced=num_replaced,
        model=model,
        stream=_switch(body, "stream"),
        with_usage=_switch(body.get("stream_options") or {}, "include_usage"),
        with_logprobs=_switch(body, "logprobs"),
    )


def _params(body: Mapping[str, Any], rollout: SamplingParams, replaces: bool) -> tuple[SamplingParams, int]:
    """Return the sampling parameters of the answer, and how many of the request's parameters were replaced.

    Raises InvalidRequest if a parameter is not valid, or differs from the rollout's and `replaces` is False.
    """
    fixed = {name: getattr(rollout, name) for name in _SHAPING} | _NO_PENALTY
    others = [name for name, value in fixed.items() if body.get(name) is not None and body[name] != value]
    if others and not replaces:
        name = others[0]
        raise InvalidRequest(
            f"{name}={body[name]!r:.80} differs from the rollout's {fixed[name]:g}, the distribution that the trainer computes "
            f"log-probabilities of; leave {name} out, or start the run with --agent-sampling replace",
            name,
        )
    limit = given_max_tokens(body)
    if limit is not None and limit < 1:
        raise InvalidRequest(f"max_tokens is {limit}; it must be at least 1", "max_tokens")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    _, valid, rule = FIELD_RULES["stop"]
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(each, str) and valid(each) for each in stops):
        raise InvalidRequest(f"stop is {stop!r:.80}; it must be {rule}, at most {_MAX_STOPS}", "stop")
    max_new_tokens = rollout.max_new_tokens if limit is None else min(limit, rollout.max_new_tokens)
    return replace(rollout, max_new_tokens=max_new_tokens, stop=tuple(dict.fromkeys((*rollout.stop, *stops)))), len(others)


def _switch(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be true or false", name)
    return bool(value)


def _messages(value: Any) -> Messages:
    try:
        messages = check_messages(value, "messages")
    except DataError as error:
        raise InvalidRequest(str(error), "messages") from None
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise InvalidRequest(f"tool_calls is {message['tool_calls']!r:.80}; it must be a list", "messages")
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return messages


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates render them; text that is not a JSON object stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f'a tool call is {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}, not {call!r:.80}',
            "messages",
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")  # not orjson: integers may have any size, as in the policy's calls
            json.dumps(parsed, ensure_ascii=False).encode()  # fails on lone surrogates; the arguments then stay text
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"type": "function", "id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: list[Any]) -> tuple[Tool, ...]:
    tools = []
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, not {tool!r:.80}', "tools")
        description, parameters = function.get("description") or "", function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(description, str) or not isinstance(parameters, dict):
            raise InvalidRequest(
                f"the tool {function['name']} must have text as its description and a JSON schema as its parameters", "tools"
            )
        tools.append(Tool(function["name"], description, parameters))
    return tuple(tools)
