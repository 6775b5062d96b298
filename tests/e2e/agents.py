"""Agents that the runs of tests train: one written with the `openai` package, one of smolagents."""

from typing import Any

import openai

from fuligo.environments.environment import Row
from fuligo.gateway.session import Session
from tests.e2e.worlds import kill_engine


async def asks_twice(session: Session, row: Row) -> float:
    """Ask, and ask back; reward even last characters."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: list[Any] = list(row.prompt)
        for _ in range(2):
            answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            messages += [answer, {"role": "user", "content": "are you sure?"}]
        return float(ord((answer.content or " ")[-1]) % 2)


def smol(session: Session, row: Row) -> dict[str, float]:
    """Let a CodeAgent of smolagents work; reward even last characters."""
    from smolagents import CodeAgent, LogLevel, OpenAIModel

    model = OpenAIModel("policy", api_base=session.base_url, api_key=session.api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "write code"  # the default has thousands of tokens in the tests' vocabulary
    result = str(agent.run(str(row.prompt[-1]["content"])))
    return {"score": float(len(result) % 2), "steps": float(len(agent.memory.steps))}


async def loses_engine(session: Session, row: Row) -> float:
    """Ask twice; the engine may be killed in between, while other agents wait for it."""
    reward = await asks_twice(session, row)
    kill_engine(row)
    await asks_twice(session, row)
    return reward
