"""Bodies of the gateway's three APIs with one value of another kind: an answer or an error of the client, never the gateway's."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.unit.environments.conversations import ENDS
from tests.unit.gateway.test_server import Says, opened

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
FUNCTION = {"name": "add", "description": "d", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "max_tokens": 4,
        "temperature": 1,
        "stop": ["x"],
        "stream": False,
        "logprobs": True,
        "stream_options": None,
    },
    "responses": {
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 4,
        "text": {"format": {"type": "text"}},
        "reasoning": {},
    },
    "messages": {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": ""},
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]}]},
        ],
        "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
    },
}
"""Sound bodies, by path."""
ODD: list[Any] = [
    None,
    -1,
    10**30,
    "x",
    "\ud800",
    [],
    {},
    [None],
    {"type": "text"},
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in inside:
        yield (*at, step)
        yield from places(below, (*at, step))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    inner: Any = body
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
async def test_a_value_of_another_kind_is_refused_or_answered(path: str) -> None:
    failed: list[str] = []
    async with opened(Says("x" + ENDS[0]), replaces_params=True) as (_, session, _), aiohttp.ClientSession() as http:
        url = f"{session.base_url}/{path}"
        headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        async with http.post(url, data=json.dumps(BODIES[path]), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        for place in places(BODIES[path]):
            for value in ODD:
                async with http.post(url, data=json.dumps(changed(BODIES[path], place, value)), headers=headers) as answer:
                    if answer.status not in (200, 400):
                        failed.append(f"{answer.status}: {place} is {value!r}")
    assert failed == []
