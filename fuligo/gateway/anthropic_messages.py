"""Anthropic's `/v1/messages`: requests as chat completions, and answers as content blocks."""

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

from fuligo.engines.generation import Tokenizer
from fuligo.engines.openai_format import InvalidRequest, event, joined_text, objects, parse_body
from fuligo.gateway.completion import Completion, Dialect, arguments_text
from fuligo.types import Messages

_TRANSLATED = {"system", "messages", "tools", "tool_choice", "stop_sequences", "thinking"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_ERRORS = {"server_error": "api_error"}

_text = partial(
    joined_text, types=("text",), otherwise="a content block is {}; only text, tool_use, tool_result and thinking are supported"
)


def chat_body(raw: bytes) -> dict[str, Any]:
    """Translate a request to the body of a chat completion request; parameters without a translation are passed on unchanged.

    Raises InvalidRequest if the request is malformed.
    """
    body = parse_body(raw)
    messages = [each for message in objects(body.get("messages"), "messages") for each in _messages(message)]
    if (system := body.get("system")) is not None:
        messages.insert(0, {"role": "system", "content": _text(system, "system")})
    chat: dict[str, Any] = {name: value for name, value in body.items() if name not in _TRANSLATED} | {"messages": messages}
    if (tools := body.get("tools")) is not None:
        chat["tools"] = [_tool(tool) for tool in objects(tools, "tools")]
    if (stops := body.get("stop_sequences")) is not None:
        chat["stop"] = stops
    if (choice := body.get("tool_choice")) is not None:
        kind = choice.get("type") if isinstance(choice, dict) else choice
        chat["tool_choice"] = kind if kind in ("auto", "none") else choice
    thinking = body.get("thinking")
    if thinking is not None and thinking != {"type": "disabled"}:
        chat["thinking"] = thinking
    return chat


def _messages(message: dict[str, Any]) -> Messages:
    """Translate one message to chat messages: each tool result becomes a separate message, placed before the text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequest(f"a message has the role {role!r:.40}; it must be user or assistant", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, "messages")
    if role == "user":
        results = [block for block in blocks if block.get("type") == "tool_result"]
        converted: Messages = [
            {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content") or "", "messages")}
            for block in results
        ]
        texts = [block for block in blocks if block.get("type") != "tool_result"]
        return [*converted, {"role": "user", "content": _text(texts, "messages")}] if texts else converted
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    thoughts = [str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    answer["content"] = _text([block for block in blocks if block.get("type") not in ("thinking", "tool_use")], "messages")
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = [
            {"type": "function", "id": call.get("id"), "function": {"name": call.get("name"), "arguments": call.get("input", {})}}
            for call in calls
        ]
    return [answer]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"the tool {tool.get('name')!r:.40} has the type {tool['type']!r:.40}; only custom tools, which the agent runs, are supported",
            "tools",
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def body(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the answer as one message."""
    return {**_head(completion), "content": _blocks(completion), **_end(completion), "usage": _usage(completion)}


def events(completion: Completion, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the answer as server-sent events, block by block."""
    start = {**_head(completion), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**start, "usage": {**_usage(completion), "output_tokens": 0}})
    for index, block in enumerate(_blocks(completion)):
        match block["type"]:
            case "tool_use":
                empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments_text(block["input"])}
            case "thinking":
                empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        yield _event("content_block_start", index=index, content_block=block | empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(completion), usage=_usage(completion))
    yield _event("message_stop")


def _event(kind: str, **content: Any) -> bytes:
    return event({"type": kind, **content}, kind)


def _head(completion: Completion) -> dict[str, Any]:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": completion.model}


def _end(completion: Completion) -> dict[str, Any]:
    if completion.stop and completion.finish_reason == "stop":
        stop = next(each for each in completion.request.params.stop if completion.stop.startswith(each))
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS[completion.finish_reason], "stop_sequence": None}


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    message = completion.message
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]})
    return blocks


def _usage(completion: Completion) -> dict[str, int]:
    return {"input_tokens": completion.num_prompt_tokens, "output_tokens": len(completion.sampled.ids)}


def error(message: str, kind: str = "invalid_request_error", *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    return {"type": "error", "error": {"type": _ERRORS.get(kind, kind), "message": message}}


DIALECT = Dialect(chat_body, body, events, error)
