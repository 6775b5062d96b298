"""OpenAI's API on a real engine in this process; the oracle is the engine's own `/generate`."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fuligo.engines.embedded.openai_api import OpenAiApi, TextStream
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import SamplingParams
from fuligo.engines.openai_format import DONE
from fuligo.formats.engine_keys import EngineKeys
from tests import tiny
from tests.unit.engines.embedded.test_http_api import engine, http, post  # noqa: F401  # fixtures

MESSAGES = [{"role": "user", "content": "what is 2 + 3?"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.tokenizer()


async def generated(http: httpx.AsyncClient, ids: list[int], **params: Any) -> str:  # noqa: F811
    sampling = {"max_new_tokens": 12, "sampling_seed": 7, "ignore_eos": True} | params
    return (await post(http, "/generate", {"input_ids": ids, "sampling_params": sampling}))["text"]


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:  # noqa: F811
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_is_rendered_by_the_template(http: httpx.AsyncClient, tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(str(rendered), add_special_tokens=False)["input_ids"]
    answer = await post(http, "/v1/chat/completions", CHAT | {"n": 2})
    assert [choice["message"] for choice in answer["choices"]] == [
        {"role": "assistant", "content": await generated(http, ids, sampling_seed=7 + number)} for number in range(2)
    ]
    assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 24, "total_tokens": len(ids) + 24}
    assert answer["choices"][0]["finish_reason"] == "length" and answer["model"] == "tiny"


async def test_a_stream_is_the_whole_answer_in_parts(http: httpx.AsyncClient) -> None:  # noqa: F811
    whole = await post(http, "/v1/chat/completions", CHAT)
    content = whole["choices"][0]["message"]["content"]
    parts = await events(http, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    *chunks, usage = parts
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == content
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert usage["usage"] == whole["usage"]
    stop = content[5:8]
    ended = await events(http, "/v1/chat/completions", CHAT | {"stop": stop})
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in ended) == content[: content.index(stop)], (
        "no part of the stop string"
    )
    assert ended[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_sends_nothing_of_a_stop_string_whose_request_has_not_ended_yet(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("how many are left", add_special_tokens=False)["input_ids"]
    request = Request("r", [1], SamplingParams(99, stop=("left",)), frozenset(), 0, waiter=asyncio.get_running_loop().create_future())
    request.output_ids = list(ids)
    engine = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer), abort=lambda which: None)  # noqa: F811
    api = OpenAiApi(engine)
    parts = api._events([request], {}, is_chat=False, with_usage=False, held_back=len("left") - 1)
    texts = [json.loads((await anext(parts)).removeprefix(b"data: "))["choices"][0]["text"]]
    assert texts[0] and "how many are ".startswith(texts[0])
    request.finish_reason = {"type": "stop", "matched": "left"}
    request.waiter.set_result(None)
    texts += [json.loads(part.removeprefix(b"data: "))["choices"][0]["text"] async for part in parts if part != DONE]
    assert "".join(texts) == "how many are "


@given(st.text(max_size=60), st.lists(st.integers(1, 7), min_size=1, max_size=40))
@example("naïve 😀👩‍👩‍👧 日本\ufffd語", [1])
def test_a_text_stream_is_a_prefix_of_the_text_at_every_token(tokenizer: PreTrainedTokenizerFast, text: str, sizes: list[int]) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = str(tokenizer.decode(ids, skip_special_tokens=True))
    stream, done = TextStream(tokenizer), 0
    for size in itertools.cycle(sizes):
        done += size
        read = stream.read(ids[:done])
        assert whole.startswith(read)
        if done >= len(ids):
            break
    assert read == whole or whole.endswith("\ufffd")


def test_a_text_stream_decodes_only_new_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    class Counting:
        num_decoded = 0

        def decode(self, ids: list[int], **options: bool) -> str:
            self.num_decoded += len(ids)
            return str(tokenizer.decode(ids, **options))

    ids = tokenizer("how many apples are left? " * 100, add_special_tokens=False)["input_ids"]
    counting = Counting()
    stream = TextStream(counting)
    for done in range(1, len(ids) + 1):
        text = stream.read(ids[:done])
    assert text == tokenizer.decode(ids) and counting.num_decoded < 4 * len(ids)


async def test_text_completions_take_text_or_ids(http: httpx.AsyncClient, tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    ids = tokenizer("2 + 3 =", add_special_tokens=False)["input_ids"]
    expected = await generated(http, ids)
    body = {key: value for key, value in CHAT.items() if key != "messages"}
    for prompt in ("2 + 3 =", ids):
        answer = await post(http, "/v1/completions", body | {"prompt": prompt})
        assert answer["choices"][0]["text"] == expected
    parts = await events(http, "/v1/completions", body | {"prompt": ids})
    assert "".join(part["choices"][0]["text"] for part in parts) == expected
    assert (await http.get("/v1/models")).json()["data"][0]["object"] == "model"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"messages": "hi"}, "'messages' must be"),
        ({"n": 0.5}, "n is 0.5"),
        ({"logprobs": True}, "logprobs=True is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_new_tokens"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stream": True, "stream_options": "usage"}, "stream_options is 'usage'"),
        ({"tools": {}}, "tools is {}"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is [1]"),
        ({"chat_template_kwargs": {"chat_template": "{% for i in range(1000000000) %}x{% endfor %}"}}, "chat_template"),
    ],
)
async def test_bad_requests_are_named(http: httpx.AsyncClient, changed: dict[str, Any], problem: str) -> None:  # noqa: F811
    response = await http.post("/v1/chat/completions", json=CHAT | changed)
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


def test_the_key_for_requests_opens_only_completions() -> None:
    keys = EngineKeys("requests", "control")
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert keys.admits("POST", path, "Bearer requests") and not keys.admits("POST", path, "Bearer wrong")
    assert not keys.admits("POST", "/update_weights_from_disk", "Bearer requests")
