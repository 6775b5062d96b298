"""The gateway over HTTP, by OpenAI's own client: answers, refusals, and authentication."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from fuligo.engines.generation import FinishReason, Generation, SamplingParams
from fuligo.errors import EngineError
from fuligo.gateway import server
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Session
from fuligo.types import IntArray
from tests.unit.environments.conversations import ADD, ENDS, ids
from tests.unit.gateway.world import PARAMS, RandomEngine, policy

QUESTION: list[Any] = [{"role": "user", "content": "what is 1 + 2"}]


class Says(RandomEngine):
    """Engine that always writes the same text."""

    def __init__(self, text: str, reason: FinishReason = "stop") -> None:
        super().__init__(random.Random(0))
        self.ids, self.reason = np.array(ids(text), np.int32), reason

    async def generate(self, input_ids: IntArray, params: SamplingParams, **more: Any) -> Generation:
        generation = await super().generate(input_ids, params, **more)
        self.params = params
        return replace(generation, output_ids=self.ids, logprobs=np.full(len(self.ids), -0.5, np.float32), finish_reason=self.reason)


@asynccontextmanager
async def opened(engine: Any, params: Any = PARAMS, **changes: Any) -> AsyncIterator[tuple[Gateway, Session, openai.AsyncOpenAI]]:
    gateway = Gateway(policy(engine, **changes))
    session = await gateway.open(params, label="0")
    try:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
            yield gateway, session, client
    finally:
        await gateway.close()


async def test_no_server_is_left_if_the_first_session_is_canceled_while_it_starts():
    gateway = Gateway(policy(RandomEngine(random.Random(0))))
    opening = asyncio.create_task(gateway.open(PARAMS, label="0"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await gateway.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_client_reads_text_usage_and_log_probabilities() -> None:
    engine = Says("the sum" + ENDS[0])
    async with opened(engine) as (_, _, client):
        answer = await client.chat.completions.create(model="any", messages=QUESTION, logprobs=True, max_tokens=9, temperature=1.0)
        assert [model.id async for model in await client.models.list()] == ["tiny"]
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "the sum", "stop")
    assert answer.model == "any" and engine.params.max_new_tokens == 9
    assert answer.usage is not None and answer.usage.completion_tokens == len(engine.ids)
    assert answer.usage.prompt_tokens == len(engine.requests[0][0])
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * len(engine.ids)
    assert "".join(entry.token for entry in choice.logprobs.content) == "the sum" + ENDS[0]


async def test_a_stream_brings_the_same_as_a_whole_answer() -> None:
    engine = Says('<think>\nr\n</think>\n\nso<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' + ENDS[0])
    async with opened(engine, template="QWEN3") as (_, _, client):
        asked: dict[str, Any] = {"model": "m", "messages": QUESTION, "tools": [ADD.to_json()]}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert whole.finish_reason == chunks[-2].choices[0].finish_reason == "tool_calls" and whole.message.tool_calls
    assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "") == "so"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == whole.message.reasoning_content == "r"
    (call,), (streamed,) = whole.message.tool_calls, [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function.arguments == streamed.function.arguments == '{"a":1}' and call.id == streamed.id
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(engine.ids)


async def test_a_stop_string_ends_the_text_and_stays_in_the_ids() -> None:
    engine = Says("the sum</code>")
    async with opened(engine) as (_, session, client):
        answer = await client.chat.completions.create(model="m", messages=QUESTION, stop=["</code>"])
        said: Any = {"role": "assistant", "content": "the sum</code>"}  # as smolagents sends it back
        await client.chat.completions.create(model="m", messages=[*QUESTION, said, *QUESTION])
    assert answer.choices[0].message.content == "the sum" and engine.params.stop == ()
    first, second = session.conversation.turns
    assert second.parent is first
    assert np.array_equal(engine.requests[1][0][: len(first.tokens())], first.tokens())


async def test_calls_are_text_for_an_agent_without_tools() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with opened(Says(text + ENDS[0])) as (_, _, client):
        message = (await client.chat.completions.create(model="m", messages=QUESTION)).choices[0].message
    assert message.content == text and message.tool_calls is None


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"temperature": 0.5}, "temperature", "temperature=0.5 differs from the rollout's 1"),
        ({"top_p": 0.9}, "top_p", "start the run with --agent-sampling replace"),
        ({"presence_penalty": 0.1}, "presence_penalty", "differs from the rollout's 0"),
        ({"n": 2}, "n", "n=2 is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "the gateway returns every answer exactly as it was sampled"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
        ({"max_tokens": 0}, "max_tokens", "it must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens", "it must be an integer"),
        ({"stop": [1]}, "stop", "it must be a non-empty string"),
        ({"stop": [""]}, "stop", "it must be a non-empty string"),
        ({"messages": []}, "messages", "must be a string or a list of chat messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, "messages", "a tool call is"),
        ({"tools": [{"type": "web_search"}]}, "tools", "a tool must be"),
        ({"stream": "yes"}, "stream", "it must be true or false"),
        ({"guided_json": {}}, "guided_json", "is not supported"),
    ],
)
async def test_what_training_cannot_honor_is_refused_in_openais_format(body: dict[str, Any], param: str, reason: str) -> None:
    async with opened(Says("x" + ENDS[0])) as (_, _, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/chat/completions", body={"messages": QUESTION, "model": "m", **body}, cast_to=object)
    assert refused.value.param == param and reason in str(refused.value)


@pytest.mark.parametrize("value", ["123456789012345678901234567890", "-1e999", "NaN", '{"a": ' * 300 + "1" + "}" * 300])
async def test_calls_with_values_that_json_libraries_refuse_reach_the_agent_and_return(value: str) -> None:
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>'
    async with opened(Says(call + ENDS[0])) as (_, session, client):
        messages = list(QUESTION)
        for _ in range(2):
            answer = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD.to_json()])).choices[0].message
            assert answer.tool_calls
            messages += [answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "7"}]
        assert [len(path) for path in session.conversation.branches()] == [2]


async def test_deep_schemas_and_calls_are_refused() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": {"b": 1}}}}
    async with opened(Says("7" + ENDS[0])) as (_, _, client):
        with pytest.raises(openai.BadRequestError, match="less deeply"):
            await client.chat.completions.create(
                model="m", messages=QUESTION, tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}]
            )
        with pytest.raises(openai.BadRequestError, match="less deeply"):
            odd: list[Any] = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": deep, "content": ""}]
            await client.chat.completions.create(model="m", messages=odd)


async def test_replaced_parameters_are_counted() -> None:
    engine = Says("x" + ENDS[0])
    async with opened(engine, replaces_params=True) as (_, session, client):
        await client.chat.completions.create(model="m", messages=QUESTION, temperature=0.2, tool_choice="required", tools=[ADD.to_json()])
    assert engine.params.temperature == 1.0 and session.num_replaced == 1


async def test_a_full_context_is_told_as_such() -> None:
    async with opened(Says("x"), max_context_len=8) as (_, _, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=QUESTION)
    assert refused.value.code == "context_length_exceeded"


async def test_an_engines_failure_is_not_retried_by_the_client() -> None:
    class Failing:
        async def generate(self, *_: Any, **__: Any) -> None:
            raise EngineError("engine http://x failed 4 times")

    async with opened(Failing()) as (_, session, client):
        with pytest.raises(openai.InternalServerError, match="failed 4 times"):
            await client.with_options(max_retries=3).chat.completions.create(model="m", messages=QUESTION)
    assert session.num_requests == 1


async def test_a_client_that_leaves_cancels_its_request() -> None:
    engine = RandomEngine(random.Random(0), delay_s=1000.0)
    async with opened(engine) as (_, session, client):
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(model="m", messages=QUESTION)
        while engine.num_running or session.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not session.conversation.turns


async def test_nobody_gets_in_without_the_key_of_the_session() -> None:
    engine = Says("x" + ENDS[0])
    async with opened(engine) as (gateway, session, client):
        other = await gateway.open(PARAMS, label="1")
        for key in ("sk-wrong", other.api_key, session.api_key[:-1], session.name):
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key=key).chat.completions.create(model="m", messages=QUESTION)
        unknown = session.base_url.replace(session.name, "0" * 16)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(base_url=unknown).chat.completions.create(model="m", messages=QUESTION)
        authorized = {"Authorization": f"Bearer {session.api_key}"}
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{session.base_url}/models") as answer:
                assert answer.status == 401
            async with http.get(f"{session.base_url}/models", headers={**authorized, "Host": "evil.example"}) as answer:
                assert answer.status == 403
            async with http.post(f"{session.base_url}/chat/completions", headers=authorized, data={"a": "form"}) as answer:
                assert answer.status == 415
            async with http.post(f"{session.base_url}/completions", headers=authorized, json={}) as answer:
                assert answer.status == 404
    assert not engine.requests and session.num_requests == other.num_requests == 0
    assert session.api_key not in repr(session) and session.base_url.startswith("http://127.0.0.1:")


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
async def test_agents_reach_it_by_ipv6() -> None:
    gateway = Gateway(policy(Says("x" + ENDS[0])), host="::1")
    try:
        session = await gateway.open(PARAMS, label="0")
        assert session.base_url.startswith("http://[::1]:")
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
            assert (await client.chat.completions.create(model="m", messages=QUESTION)).choices
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="sk-wrong").chat.completions.create(model="m", messages=QUESTION)
    finally:
        await gateway.close()


async def test_a_late_request_is_told_that_its_session_has_ended() -> None:
    async with opened(Says("x" + ENDS[0])) as (gateway, session, client):
        gateway.end(session)
        with pytest.raises(openai.APIStatusError, match="the session has ended") as refused:
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert refused.value.status_code == 410
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong").chat.completions.create(model="m", messages=QUESTION)


async def test_huge_and_malformed_bodies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 2**20)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 2**16

    async with opened(Says("x" + ENDS[0])) as (_, session, client), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        url = f"{session.base_url}/chat/completions"
        async with http.post(url, data=b"x" * (2**20 + 1), headers=headers) as answer:
            assert answer.status == 413
        for raw in (b"", b"{", b"[]", b'"text"', b"[" * 100_000, b"\xff", b'{"messages": 1e999}'):
            async with http.post(url, data=raw, headers=headers) as answer:
                assert answer.status == 400 and "error" in await answer.json()
        with pytest.raises((aiohttp.ClientError, AssertionError)):
            async with http.post(url, data=endless(), headers=headers) as answer:
                assert answer.status != 413
        assert (await client.chat.completions.create(model="m", messages=QUESTION)).choices


async def test_a_thousand_requests_at_once_are_all_answered() -> None:
    engine = RandomEngine(random.Random(0), delay_s=0.1)
    async with opened(engine) as (_, session, _), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        headers = {"Authorization": f"Bearer {session.api_key}"}

        async def ask() -> int:
            async with http.post(f"{session.base_url}/chat/completions", json={"messages": QUESTION}, headers=headers) as answer:
                await answer.read()
                return answer.status

        assert set(await asyncio.gather(*(ask() for _ in range(1000)))) == {200}
        seeds = {tuple(turn.sampled.ids) for turn in session.conversation.turns}
    assert len(session.conversation.turns) == 1000 and len(seeds) > 1


async def test_every_request_of_a_session_has_a_seed_of_its_own_and_the_same_in_every_run() -> None:
    async def seeds() -> list[int | None]:
        engine = Says("x" + ENDS[0])
        found = []
        async with opened(engine) as (_, _, client):
            for messages in (QUESTION, QUESTION, [*QUESTION, *QUESTION]):
                await client.chat.completions.create(model="m", messages=messages)
                found.append(engine.params.sampling_seed)
        return found

    first = await seeds()
    assert len(set(first)) == 3 and first == await seeds()


async def test_a_reward_comes_by_http_once() -> None:
    async with opened(Says("x" + ENDS[0])) as (_, session, client):
        for bad in ({}, {"reward": "1"}, {"reward": {}}, {"reward": {"a": None}}, {"reward": True}):
            with pytest.raises(openai.BadRequestError):
                await client.post("/reward", body=bad, cast_to=object)
        await client.post("/reward", body={"reward": {"score": 1.0}}, cast_to=object)
        assert await session.reward() == {"score": 1.0}
        with pytest.raises(openai.ConflictError):
            await client.post("/reward", body={"reward": 0.0}, cast_to=object)


async def test_a_call_with_half_a_character_is_text() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    async with opened(Says(call + ENDS[0])) as (_, _, client):
        answer = (await client.chat.completions.create(model="m", messages=QUESTION, tools=[ADD.to_json()])).choices[0].message
        assert answer.tool_calls is None and answer.content == call
        function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
        asked: list[Any] = [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]
        assert (await client.chat.completions.create(model="m", messages=[*QUESTION, *asked, *QUESTION])).choices


async def test_connections_without_a_key_are_limited_in_time_bytes_and_number() -> None:
    async with opened(Says("7" + ENDS[0])) as (gateway, session, client):
        address, port = session.base_url.split("/")[2].split(":")

        async def closed(text: bytes, size: int = 0) -> bool:
            reader, writer = await asyncio.open_connection(address, int(port))
            try:
                writer.write(text + b"a" * size)
                return await asyncio.wait_for(reader.read(), 20) == b""
            except ConnectionError:
                return True
            finally:
                writer.close()

        asked = [client.chat.completions.create(model="m", messages=QUESTION) for _ in range(2)]
        await asked[0]
        gateway.strangers.max_s = 0.2
        assert await closed(b"") and await closed(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        gateway.strangers.max_s = 60
        assert await closed(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", 2 << 20)
        gateway.strangers.max_connections = 1
        first = asyncio.create_task(closed(b""))
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection(address, int(port))
        assert await first and not reader.at_eof()
        writer.close()
        await asked[1]  # on the connection of the first, which is older than any of these
