"""`/v1/responses` and Anthropic's `/v1/messages`, by the clients of OpenAI and Anthropic."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from fuligo.gateway.session import Session
from fuligo.rollout.agents import branches
from tests.unit.environments.conversations import ADD, ENDS, ids, tokenizer
from tests.unit.gateway.test_server import Says, opened
from tests.unit.gateway.world import RandomEngine, check_exact
from tests.unit.rollout.episode_world import fresh

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINKS_AND_CALLS = f"<think>\nr\n</think>\n\nso{CALL}{ENDS[0]}"
SCHEMA: Any = dict(ADD.parameters)
CLAUDE_TOOLS: list[Any] = [{"name": ADD.name, "description": ADD.description, "input_schema": SCHEMA}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": ADD.name, "description": ADD.description, "parameters": SCHEMA, "strict": False}]


@asynccontextmanager
async def claude(engine: Any, **changes: Any) -> AsyncIterator[tuple[Session, AsyncAnthropic]]:
    import anthropic  # only where needed: the import takes a second

    async with opened(engine, **changes) as (_, session, _):
        base_url = session.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, max_retries=0) as client:
            yield session, client


async def test_anthropics_client_reads_thinking_text_and_calls() -> None:
    import anthropic

    engine = Says(THINKS_AND_CALLS)
    async with claude(engine, template="QWEN3") as (_, client):
        asked: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "1 + 2"}], "tools": CLAUDE_TOOLS}
        whole = await client.messages.create(**asked, system="Be brief.")
        async with client.messages.stream(**asked, system=[{"type": "text", "text": "Be brief."}]) as stream:
            streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        thinking, said, call = answer.content
        assert isinstance(thinking, anthropic.types.ThinkingBlock) and thinking.thinking == "r"
        assert isinstance(said, anthropic.types.TextBlock) and said.text == "so"
        assert isinstance(call, anthropic.types.ToolUseBlock) and (call.name, call.input) == ("add", {"a": 1})
        assert (answer.stop_reason, answer.role, answer.model) == ("tool_use", "assistant", "m")
        assert answer.usage.output_tokens == len(engine.ids)
    first, second = (tokenizer().decode(seen.tolist()) for seen, _ in engine.requests)
    assert first == second and "Be brief." in first and "add" in first


@pytest.mark.parametrize("kind", ["custom", None])
async def test_anthropics_tools_may_give_their_type(kind: str | None) -> None:
    engine = Says("the sum" + ENDS[0])
    async with claude(engine) as (_, client):
        for tools in (CLAUDE_TOOLS, [CLAUDE_TOOLS[0] | {"type": kind}]):
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "?"}], tools=tools)
    first, second = (seen.tolist() for seen, _ in engine.requests)
    assert first == second


async def test_openais_client_reads_the_items_of_a_response() -> None:
    engine = Says(THINKS_AND_CALLS)
    async with opened(engine, template="QWEN3") as (_, _, client):
        asked: dict[str, Any] = {"model": "m", "input": "1 + 2", "instructions": "Be brief.", "tools": RESPONSE_TOOLS}
        whole = await client.responses.create(**asked, max_output_tokens=50)
        async with client.responses.stream(**asked) as stream:
            deltas = [event.delta async for event in stream if event.type.endswith(".delta")]
            streamed = await stream.get_final_response()
    assert deltas == ["r", "so", '{"a":1}']
    for answer in (whole, streamed):
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert (answer.output_text, answer.status) == ("so", "completed")
        call: Any = answer.output[2]
        assert (call.name, call.arguments) == ("add", '{"a":1}') and call.call_id
        assert answer.usage is not None and answer.usage.output_tokens == len(engine.ids)
    assert "Be brief." in tokenizer().decode(engine.requests[0][0].tolist())


@pytest.mark.parametrize("template", ["CHATML", "QWEN3"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_an_agent_of_anthropics_api_is_trained_on_what_the_engine_sampled(template: str, seed: int) -> None:
    """Random turns with tools, sent back as Anthropic's client returned them."""
    engine = RandomEngine(random.Random(seed))
    async with claude(engine, template=template) as (session, client):
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(6):
            answer = await client.messages.create(model="m", max_tokens=64, messages=messages, tools=CLAUDE_TOOLS)
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in answer.content if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results or "go on"}]
    check_exact(branches(fresh(), session, tokenizer()), engine)
    assert any(turn.parent for turn in session.conversation.turns)


@pytest.mark.parametrize("template", ["CHATML", "QWEN3"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_an_agent_of_the_responses_api_is_trained_on_what_the_engine_sampled(template: str, seed: int) -> None:
    engine = RandomEngine(random.Random(seed))
    async with opened(engine, template=template) as (_, session, client):
        items: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(6):
            answer = await client.responses.create(model="m", input=items, tools=RESPONSE_TOOLS)
            calls = [item for item in answer.output if item.type == "function_call"]
            items += answer.output
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
            items += [] if calls else [{"role": "user", "content": [{"type": "input_text", "text": "go on"}]}]
    check_exact(branches(fresh(), session, tokenizer()), engine)
    assert any(turn.parent for turn in session.conversation.turns)


async def test_stops_and_limits_have_the_names_of_each_api() -> None:
    async with claude(Says("the sum</code>")) as (_, client):
        stopped = await client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "?"}], stop_sequences=["</code>"]
        )
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "</code>", "the sum")
    async with claude(Says("the", "length")) as (session, client):
        cut = await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "?"}])
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as other:
            incomplete = await other.responses.create(model="m", input="?")
    assert cut.stop_reason == "max_tokens"
    assert incomplete.incomplete_details is not None and incomplete.incomplete_details.reason == "max_output_tokens"


async def test_answers_of_all_apis_belong_to_one_conversation() -> None:
    """An answer to one API is recognized in a request to another."""
    engine = Says("the sum" + ENDS[0])
    async with claude(engine) as (session, client), openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as other:
        messages: list[Any] = [{"role": "user", "content": "?"}]
        await client.messages.create(model="m", max_tokens=9, messages=messages)
        messages += [{"role": "assistant", "content": "the sum"}, {"role": "user", "content": "and?"}]
        await other.responses.create(model="m", input=messages)
        await other.chat.completions.create(model="m", messages=messages)
    first, second, third = session.conversation.turns
    assert second.parent is third.parent is first
    assert len(first.sampled.ids) == len(ids("the sum" + ENDS[0]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extra_body": {"temperature": 0.5}}, "temperature=0.5 differs from the rollout's 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking=.* is not supported"),
        ({"tool_choice": {"type": "any"}, "tools": CLAUDE_TOOLS}, "tool_choice=.* is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "has the type 'web_search_20250305'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a content block is"),
        ({"messages": [{"role": "system", "content": "?"}]}, "it must be user or assistant"),
    ],
)
async def test_anthropics_client_reads_refusals(changes: dict[str, Any], reason: str) -> None:
    import anthropic

    async with claude(Says("x" + ENDS[0])) as (_, client):
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}], **changes}
        with pytest.raises(anthropic.BadRequestError, match=reason):
            await client.messages.create(**asked)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="sk-wrong").messages.create(**asked)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "the gateway stores no responses"),
        ({"reasoning": {"effort": "high"}}, "reasoning=.* is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text=.* is not supported"),
        ({"tools": [{"type": "web_search"}]}, "a tool must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an input item has type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part of the input is"),
    ],
)
async def test_what_a_response_cannot_honor_is_refused(changes: dict[str, Any], reason: str) -> None:
    async with opened(Says("x" + ENDS[0])) as (_, _, client):
        asked: dict[str, Any] = {"model": "m", "input": "?", **changes}
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.responses.create(**asked)
