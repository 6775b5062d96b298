"""Sessions under failure, over HTTP: engines that die or are aborted under a stream, clients that leave, sessions that end or never do."""

import asyncio
import gc
import random
from typing import Any

import numpy as np
import openai
import pytest

from fuligo.engines.generation import Generation, SamplingParams
from fuligo.errors import EngineError
from fuligo.gateway.conversation import Turn
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Session
from fuligo.rollout.agents import branches
from fuligo.types import IntArray
from tests.unit.environments.conversations import ENDS, ids, tokenizer
from tests.unit.gateway.test_server import QUESTION, opened
from tests.unit.gateway.world import PARAMS, RandomEngine, check_exact, policy
from tests.unit.rollout.episode_world import fresh
from tests.unit.rollout.test_agents import ask

SAID = "漢字 é🙂🙂 and so on" + ENDS[0]


class Held(RandomEngine):
    """Engine that says `SAID`, and holds requests until `go` is set, or until `abort` cuts them off after some tokens."""

    def __init__(self, cut: int = 0) -> None:
        super().__init__(random.Random(0))
        self.go, self.cut = asyncio.Event(), cut
        self.is_aborting = False
        self.arrived = asyncio.Event()

    async def generate(self, input_ids: IntArray, params: SamplingParams, **more: Any) -> Generation:
        self.num_running += 1
        self.arrived.set()
        try:
            await self.go.wait()
        finally:
            self.num_running -= 1
        rest = ids(SAID)[sum(len(each.output_ids) for _, each in self.requests) :]
        new = np.array(rest[: self.cut] if self.is_aborting else rest, np.int32)
        reason = "abort" if self.is_aborting else "stop"
        generation = Generation(new, np.full(len(new), -0.5, np.float32), reason, self.version, len(input_ids), 0, "", engine=0)
        self.requests.append((np.array(input_ids), generation))
        return generation


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 9, 13])
async def test_a_stream_continues_after_a_weight_sync(cut: int) -> None:
    """Also between the tokens of one character; the client reads one text, and each token has the version that sampled it."""
    engine = Held(cut)
    async with opened(engine) as (_, session, client):
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION, stream=True))
        await engine.arrived.wait()
        engine.is_aborting = True
        engine.go.set()
        await session.interrupted.wait()
        engine.is_aborting, engine.version = False, 1
        session.resume()
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in await asked])
        assert text == SAID.removesuffix(ENDS[0])
    (sample,) = branches(fresh(), session, tokenizer())
    check_exact([sample], engine)
    assert sample.versions.tolist() == [0] * cut + [1] * (sample.response_length - cut)


async def test_an_engine_that_dies_under_a_stream_is_told_and_the_session_goes_on() -> None:
    class Dies(Held):
        async def generate(self, input_ids: IntArray, params: SamplingParams, **more: Any) -> Generation:
            if not self.is_aborting:
                self.is_aborting = True
                raise EngineError("engine http://x: connection lost")
            self.is_aborting = False
            return await super().generate(input_ids, params, **more)

    engine = Dies()
    engine.go.set()
    async with opened(engine) as (_, session, client):
        with pytest.raises(openai.InternalServerError, match="connection lost"):
            await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        answer = await client.chat.completions.create(model="m", messages=QUESTION)
    assert answer.choices[0].message.content == SAID.removesuffix(ENDS[0]) and len(session.conversation.turns) == 1


async def test_a_client_that_leaves_its_stream_cancels_the_request_in_the_engine() -> None:
    engine = Held()
    async with opened(engine) as (_, session, client):
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION, stream=True))
        await engine.arrived.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        while engine.num_running or session.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not session.conversation.turns


@pytest.mark.parametrize("is_suspended", [False, True])
async def test_the_end_of_a_session_ends_its_requests_at_once(is_suspended: bool) -> None:
    """A client in a thread waits for the answer after its agent was canceled; the engine must not go on for it."""
    engine = Held()
    async with opened(engine) as (gateway, session, client):
        if is_suspended:
            session.suspend()
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))
        while not session.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if not is_suspended:
            await engine.arrived.wait()
        gateway.end(session)
        with pytest.raises(openai.APIStatusError, match="the session has ended"):
            await asked
        assert not engine.num_running and not session.conversation.turns


async def test_an_abort_after_the_end_of_a_session_leaves_no_request_waiting() -> None:
    engine = RandomEngine(random.Random(0), abort_share=1.0)
    async with opened(engine) as (gateway, session, client):
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))
        await session.interrupted.wait()
        gateway.end(session)
        session.suspend()
        with pytest.raises(openai.APIStatusError, match="the session has ended"):
            await asked


async def test_concurrent_streams_of_one_session_are_branches_of_it() -> None:
    engine = RandomEngine(random.Random(3), delay_s=0.05)

    async def read(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async with opened(engine) as (_, session, client):
        said = await read(client, QUESTION)
        history = [*QUESTION, {"role": "assistant", "content": said}]
        await asyncio.gather(*(read(client, [*history, {"role": "user", "content": each}]) for each in ("a", "b", "a")))
    first, *others = session.conversation.turns
    assert [turn.parent for turn in others] == [first] * 3
    check_exact(branches(fresh(), session, tokenizer()), engine)


async def test_a_thousand_sessions_leave_nothing_behind() -> None:
    """Half of them are never ended by their agent, and end with the run."""
    engine = RandomEngine(random.Random(0))
    gateway = Gateway(policy(engine))

    async def play(number: int) -> None:
        session = await gateway.open(PARAMS, label=f"{number}")
        messages = list(QUESTION)
        for _ in range(2):
            messages += [await ask(session, messages), *QUESTION]
        if number % 2:
            gateway.end(session)

    def count() -> int:
        gc.collect()
        return len([each for each in gc.get_objects() if isinstance(each, Session | Turn)])

    before = count()
    await asyncio.gather(*(play(number) for number in range(1000)))
    assert count() - before == 500 * 3
    await gateway.close()
    assert count() == before
