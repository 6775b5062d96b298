"""Bodies and answers of OpenAI's API, shared by the embedded engine and the gateway: checks, completions, events and errors."""

import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any

import orjson
from starlette.responses import Response

DONE = b"data: [DONE]\n\n"
TYPES: dict[str, tuple[type, str]] = {
    "chat_template_kwargs": (dict, "an object"),
    "stream_options": (dict, "an object"),
    "tools": (list, "a list"),
    "max_tokens": (int, "an integer"),
    "max_completion_tokens": (int, "an integer"),
    "n": (int, "an integer"),
}


class InvalidRequest(ValueError):
    """Raised if a request cannot be answered; holds the parameter at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raises InvalidRequest if it is malformed."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request, with the types of its parameters checked. Raises InvalidRequest if it is malformed."""
    body = json_object(raw)
    for name, (kind, description) in TYPES.items():
        value = body.get(name)
        if value is not None and type(value) is not kind:
            raise InvalidRequest(f"{name} is {value!r:.50}; it must be {description}", name)
    return body


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return `value` if it is a list of objects. Raises InvalidRequest if it is not."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be a list of objects", name)
    return value


def joined_text(content: Any, name: str, types: Collection[str], otherwise: str) -> str:
    """Return the text of a message's content: a string, or the joined texts of its parts.

    Raises InvalidRequest if it is neither.

    Args:
        name: name of the content in errors
        types: accepted types of parts
        otherwise: error message for a part of another type or without text; `{}` is replaced by the part
    """
    if isinstance(content, str):
        return content
    parts = objects(content, name)
    for part in parts:
        if part.get("type") not in types or not isinstance(part.get("text"), str):
            raise InvalidRequest(otherwise.format(f"{part!r:.80}"), name)
    return "".join(part["text"] for part in parts)


def given_max_tokens(body: Mapping[str, Any]) -> int | None:
    """Return `max_completion_tokens`, else `max_tokens`; None if the request has neither."""
    return next((body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), None)


def head(model: str, *, is_chat: bool = True, stream: bool = False) -> dict[str, Any]:
    """Return the fields that a completion (or each chunk of a stream) begins with: id, object, created and model."""
    kind = "text_completion" if not is_chat else "chat.completion.chunk" if stream else "chat.completion"
    prefix = "chatcmpl-" if is_chat else "cmpl-"
    return {"id": prefix + secrets.token_hex(12), "object": kind, "created": int(time.time()), "model": model}


def chunk(index: int, delta: Mapping[str, Any], reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_new_tokens, "total_tokens": num_prompt_tokens + num_new_tokens}


def event(content: Any, kind: str | None = None) -> bytes:
    """Return a server-sent event with `content` as JSON, and its kind if it has one."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + orjson.dumps(content) + b"\n\n"


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def error_content(
    message: str, kind: str = "invalid_request_error", *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in the format of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
