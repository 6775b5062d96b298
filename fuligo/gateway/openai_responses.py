"""OpenAI's `/v1/responses`: requests as chat completions, and answers as output items. Nothing is stored between requests."""

import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from fuligo.engines.generation import Tokenizer
from fuligo.engines.openai_format import InvalidRequest, error_content, event, joined_text, objects, parse_body
from fuligo.gateway.completion import Completion, Dialect, arguments_text
from fuligo.types import Messages

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "text": ({"format": {"type": "text"}}, {}),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
}
"""Parameters that chat completions lack, and the values, besides null, with which they are accepted."""
_TRANSLATED = {"input", "instructions", "tools", "max_output_tokens", "previous_response_id", *_NEUTRAL}

_TEXTS = ("input_text", "output_text", "reasoning_text")
_text = partial(joined_text, name="input", types=_TEXTS, otherwise="a part of the input is {}; only text is supported")


def chat_body(raw: bytes) -> dict[str, Any]:
    """Translate a request to the body of a chat completion request. Parameters without a translation are passed on unchanged.

    Raises InvalidRequest if the body is malformed, or refers to an earlier response.
    """
    body = parse_body(raw)
    if body.get("previous_response_id") is not None:
        raise InvalidRequest(
            "previous_response_id is not supported: the gateway stores no responses; send all items", "previous_response_id"
        )
    given = body.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    if (instructions := body.get("instructions")) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    chat: dict[str, Any] = {name: value for name, value in body.items() if name not in _TRANSLATED} | {"messages": messages}
    chat |= {name: body[name] for name, values in _NEUTRAL.items() if body.get(name) is not None and body[name] not in values}
    if (tools := body.get("tools")) is not None:
        chat["tools"] = [_tool(tool) for tool in objects(tools, "tools")]
    if (limit := body.get("max_output_tokens")) is not None:
        if not isinstance(limit, int) or isinstance(limit, bool):
            raise InvalidRequest(f"max_output_tokens is {limit!r:.50}; it must be an integer", "max_output_tokens")
        chat["max_completion_tokens"] = limit
    return chat


def _messages(items: Any) -> Messages:
    """Translate items to chat messages.

    Consecutive reasoning, text and calls become one assistant message; reasoning that follows text or calls begins another.
    """
    messages: Messages = []
    answer: dict[str, Any] | None = None
    for item in objects(items, "input"):
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
            answer = None
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
            answer = None
        elif kind not in ("message", "reasoning", "function_call"):
            raise InvalidRequest(
                f"an input item has type {kind!r:.40}; supported types are message, reasoning, function_call and function_call_output",
                "input",
            )
        else:
            if answer is None or (kind == "reasoning" and (answer["content"] or "tool_calls" in answer)):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add(answer, item, kind)
    return messages


def _add(answer: dict[str, Any], item: dict[str, Any], kind: str) -> None:
    if kind == "message":
        answer["content"] += _text(item.get("content"))
    elif kind == "reasoning":
        answer["reasoning_content"] = answer.get("reasoning_content", "") + _text(item.get("content") or [])
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        answer.setdefault("tool_calls", []).append({"type": "function", "id": item.get("call_id"), "function": function})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type"), "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}


def body(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the answer as one response object."""
    return _response(completion, f"resp_{secrets.token_hex(12)}", _items(completion))


def events(completion: Completion, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the answer as server-sent events, item by item."""
    for number, (kind, content) in enumerate(_events(completion)):
        yield event({"type": kind, "sequence_number": number, **content}, kind)


def _events(completion: Completion) -> Iterator[tuple[str, dict[str, Any]]]:
    name, items = f"resp_{secrets.token_hex(12)}", _items(completion)
    begun = {**_response(completion, name, []), "status": "in_progress", "incomplete_details": None, "usage": None}
    yield "response.created", {"response": begun}
    for index, item in enumerate(items):
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if "content" in item else {"arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
        if item["type"] == "function_call":
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, "arguments": item["arguments"], "name": item["name"]}
        else:
            (part,) = item["content"]
            kind = part["type"]
            text = {**at, "content_index": 0}
            yield "response.content_part.added", {**text, "part": {**part, "text": ""}}
            yield f"response.{kind}.delta", {**text, "delta": part["text"], "logprobs": []}
            yield f"response.{kind}.done", {**text, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**text, "part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    whole = _response(completion, name, items)
    yield f"response.{whole['status']}", {"response": whole}


def _items(completion: Completion) -> list[dict[str, Any]]:
    message, status = completion.message, "incomplete" if completion.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": f"rs_{secrets.token_hex(8)}", "summary": [], "content": [part], "status": status})
    if message.get("content"):
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{secrets.token_hex(8)}", "role": "assistant", "content": [part], "status": status})
    for call in message.get("tool_calls") or ():
        function = {"name": call["function"]["name"], "arguments": arguments_text(call["function"]["arguments"])}
        items.append({"type": "function_call", "id": f"fc_{secrets.token_hex(8)}", "call_id": call["id"], **function, "status": status})
    return items


def _response(completion: Completion, name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    is_whole, request = completion.finish_reason != "length", completion.request
    num_new = len(completion.sampled.ids)
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "model": completion.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{**tool.to_json()["function"], "type": "function", "strict": False} for tool in request.tools],
        "temperature": request.params.temperature,
        "top_p": request.params.top_p,
        "usage": {
            "input_tokens": completion.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.num_prompt_tokens + num_new,
        },
    }


DIALECT = Dialect(chat_body, body, events, error_content)
