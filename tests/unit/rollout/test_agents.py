"""Samples by agents: exact tokens whatever the agent does to its history, and failures with their reason."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.environments.environment import Row
from fuligo.errors import EngineError
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Session
from fuligo.rollout import environment_calls
from fuligo.rollout.agents import AgentGenerate
from fuligo.rollout.sampler import malformation
from fuligo.types import Sample, SampleStatus
from tests.unit.environments.conversations import ADD, ids, tokenizer
from tests.unit.gateway.world import PARAMS, RandomEngine, check_exact, policy

TEMPLATES = ("CHATML", "QWEN3", "glm4moe", "llama3_1", "qwen3_5_think")


def pending(index: int = 0) -> Sample:
    return Sample(index, 0, [{"role": "user", "content": "q"}], np.array(ids("q"), np.int32), "label", {"row": 1})


def generator(agent: Any, engine: Any, template: str = "CHATML", timeout_s: float = 30.0, continues: bool = True, **changes: Any):
    return AgentGenerate(agent, Gateway(policy(engine, template, **changes)), tokenizer(), timeout_s=timeout_s, continues=continues)


async def run(generate: AgentGenerate, sample: Sample) -> list[Sample]:
    result = await generate(sample, PARAMS)
    return result if isinstance(result, list) else [result]


async def ask(session: Session, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """Send a request past HTTP; return the assistant message as a client reads it."""
    completion = await session.complete(json.dumps({"messages": messages, **body}).encode())
    return json.loads(json.dumps(completion.body(tokenizer())))["choices"][0]["message"]


class RandomAgent:
    """Agent that answers, rewrites, drops and repeats what was said, alone or with several requests at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def __call__(self, session: Session, row: Row) -> float:
        await asyncio.gather(*(self.talk(session) for _ in range(self.random.randint(1, 2))))
        return 1.0

    async def talk(self, session: Session) -> None:
        draw = self.random
        tools = {"tools": [ADD.to_json()]} if draw.random() < 0.6 else {}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 1 + 2"}]
        for number in range(draw.randint(1, 5)):
            message = await ask(session, messages, **tools)
            if draw.random() < 0.2:  # a client that asks again and keeps the first answer
                await ask(session, messages, **tools)
            messages = [*messages, self.returned(message), *self.next(message, number)]
            if len(messages) > 3 and draw.random() < 0.2:
                messages = [messages[0], *messages[-1:]] if draw.random() < 0.5 else [*messages[:-2], {"role": "user", "content": "again"}]

    def returned(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the assistant message as some clients send it back."""
        kind = self.random.random()
        if kind < 0.2:
            return {key: value for key, value in message.items() if key != "reasoning_content"}
        if kind < 0.3:
            return {**message, "content": f"{message['content'] or ''} rewritten"}
        return {**message, "content": f" {message['content'] or ''}\n"} if kind < 0.4 else message

    def next(self, message: dict[str, Any], number: int) -> list[dict[str, Any]]:
        calls = message.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"} for call in calls]
        return results or [{"role": "user", "content": self.random.choice(["and then", "é 漢", ""]) or "why"}]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=TEMPLATES)
def world(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[tuple[RandomEngine, AgentGenerate]]:
    """Start one gateway for all examples of a template."""
    engine = RandomEngine(random.Random(0), abort_share=0.2)
    generate = generator(None, engine, request.param)
    yield engine, generate
    runner.run(generate.close())
    runner.run(generate.gateway.close())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_every_sampled_token_is_trained_once_after_the_ids_that_the_engine_saw(
    world: tuple[RandomEngine, AgentGenerate], runner: asyncio.Runner, seed: int
) -> None:
    async def check() -> None:
        engine, generate = world
        engine.random, engine.requests, generate.agent = random.Random(seed), [], RandomAgent(seed)
        samples = [pending()]
        while not all(sample.finished for sample in samples):
            samples = await run(generate, samples[0])
            assert all(malformation(sample) is None for sample in samples)
        assert [sample.error for sample in samples] == [None] * len(samples)
        assert all(sample.reward == 1.0 and sample.index == 0 for sample in samples)
        check_exact(samples, engine)

    runner.run(check())


async def test_a_conversation_that_only_grows_is_one_sample() -> None:
    async def agent(session: Session, row: Row) -> dict[str, float]:
        messages = row.prompt
        for _ in range(4):
            message = await ask(session, messages)
            messages = [*messages, message, {"role": "user", "content": "more"}]
        return {"score": 0.5}

    engine = RandomEngine(random.Random(1))
    generate = generator(agent, engine)
    (sample,) = await run(generate, pending())
    await generate.gateway.close()
    check_exact([sample], engine)
    assert sample.metrics["agent_turns"] == 4 and sample.metrics["agent_branches"] == 1 and sample.reward == {"score": 0.5}
    assert [span.num_tokens for span in sample.spans] == [len(generation.output_ids) for _, generation in engine.requests]
    assert all(sample.loss_mask[span.first_token : span.first_token + span.num_tokens].all() for span in sample.spans)
    assert sample.episode is not None and [message["content"] for message in sample.episode.messages] == ["q"]
    assert [(turn.first_token, turn.num_tokens) for turn in sample.episode.turns] == [
        (span.first_token, span.num_tokens) for span in sample.spans
    ]
    assert [[message["content"] for message in turn.answers] for turn in sample.episode.turns] == [["more"]] * 3 + [[]]


async def raises(session: Session, row: Row) -> float:
    await ask(session, row.prompt)
    raise ValueError(f"no answer, key {session.api_key}")


async def hangs(session: Session, row: Row) -> float:
    await ask(session, row.prompt)
    await asyncio.sleep(3600)
    return 1.0


async def is_silent(session: Session, row: Row) -> float:
    return 1.0


async def leaves_a_request(session: Session, row: Row) -> float:
    asyncio.get_running_loop().create_task(swallow(ask(session, row.prompt)))
    while not session.num_in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return 1.0


async def swallow(request: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017
        await request


async def forgets_the_reward(session: Session, row: Row) -> None:
    await ask(session, row.prompt)


def plain_and_raises(session: Session, row: Row) -> float:
    raise KeyError(threading.current_thread().name)


async def stops_iteration(session: Session, row: Row) -> float:
    raise SystemExit(3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (raises, "the agent raised ValueError: no answer, key *** (test_agents.py:"),
        (hangs, "the agent did not return within 2 s (--agent-timeout-s); it sent 1 request, the last "),
        (is_silent, "the agent returned without an answer from the policy (0 requests)"),
        (leaves_a_request, "the agent returned while 1 of its requests were in flight"),
        (forgets_the_reward, "the agent returned no reward; return a number or a dict"),
        (plain_and_raises, "the agent raised KeyError: 'agent 3'"),
        (stops_iteration, "the agent raised RuntimeError: SystemExit: 3"),
    ],
)
async def test_an_agent_that_misbehaves_fails_its_sample_with_the_reason(agent: Any, reason: str) -> None:
    generate = generator(agent, RandomEngine(random.Random(0), delay_s=0.01), timeout_s=2.0 if agent is hangs else 30.0)
    (sample,) = await run(generate, pending(3))
    await generate.gateway.close()
    assert sample.status is SampleStatus.FAILED and (sample.error or "").startswith(reason), sample.error


async def test_an_engines_failure_is_named() -> None:
    class Failing:
        async def generate(self, *_: Any, **__: Any) -> None:
            raise EngineError("engine http://x: failed 4 times")

    generate = generator(raises, Failing())
    (sample,) = await run(generate, pending())
    await generate.gateway.close()
    assert sample.status is SampleStatus.FAILED
    assert "EngineError" in (sample.error or "") and "last error of an engine: engine http://x: failed 4 times" in (sample.error or "")


async def test_a_plain_function_runs_in_a_thread_of_its_own() -> None:
    def agent(session: Session, row: Row) -> float:
        answer = asyncio.run_coroutine_threadsafe(ask(session, row.prompt), loop).result()
        return float(answer["role"] == "assistant" and threading.current_thread() is not threading.main_thread())

    loop = asyncio.get_running_loop()
    generate = generator(agent, RandomEngine(random.Random(0)))
    (sample,) = await run(generate, pending())
    await generate.gateway.close()
    assert sample.reward == 1.0


async def test_an_agent_that_works_without_the_engine_is_interrupted_and_continues() -> None:
    tool = asyncio.Event()

    async def agent(session: Session, row: Row) -> float:
        message = await ask(session, row.prompt)
        await tool.wait()
        await ask(session, [*row.prompt, message, {"role": "user", "content": "more"}])
        return 1.0

    engine = RandomEngine(random.Random(2))
    generate = generator(agent, engine)
    first = asyncio.create_task(run(generate, pending()))
    while not engine.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    generate.interrupt()
    (sample,) = await first
    assert sample.status is SampleStatus.ABORTED and sample.response_length == len(engine.requests[0][1].output_ids)
    tool.set()
    await asyncio.sleep(0.01)
    assert len(engine.requests) == 1, "the agent waits at its next request"
    samples = await run(generate, sample)
    await generate.gateway.close()
    assert len(engine.requests) == 2
    check_exact(samples, engine)


async def test_an_interrupted_sample_that_cannot_continue_starts_over() -> None:
    started: list[Session] = []

    async def agent(session: Session, row: Row) -> float:
        started.append(session)
        await ask(session, row.prompt)
        return 1.0

    engine = RandomEngine(random.Random(0), abort_share=1.0)
    generate = generator(agent, engine, continues=False)
    (sample,) = await run(generate, pending())
    assert sample.status is SampleStatus.ABORTED and not sample.response_length and started[0].has_ended
    engine.abort_share, engine.requests = 0.0, []
    samples = await run(generate, sample)
    await generate.gateway.close()
    assert len(started) == 2
    check_exact(samples, engine)


async def test_an_agent_that_is_never_continued_is_cancelled() -> None:
    ended = asyncio.Event()

    async def agent(session: Session, row: Row) -> float:
        try:
            await ask(session, row.prompt)
        finally:
            ended.set()
        return 1.0

    generate = generator(agent, RandomEngine(random.Random(0), abort_share=1.0), timeout_s=0.2)
    await run(generate, pending())
    await asyncio.wait_for(ended.wait(), 30)
    await generate.gateway.close()


async def test_an_agent_that_ignores_its_cancellation_does_not_keep_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "_END_S", 0.1)
    is_over = False

    async def agent(session: Session, row: Row) -> float:
        while not is_over:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return 1.0

    generate = generator(agent, RandomEngine(random.Random(0)), timeout_s=0.05)
    assert (await run(generate, pending()))[0].status == SampleStatus.FAILED
    await generate.close()
    await generate.gateway.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "agent 0"]
    is_over = True
    await asyncio.sleep(0.1)
