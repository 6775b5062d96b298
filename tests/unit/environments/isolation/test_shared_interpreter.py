"""Python tool of episodes in processes of their own: one interpreter is the origin of all programs, and its limit holds for all."""

import asyncio
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from fuligo.environments import AssistantTurn, Row, ToolCall
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.environments.isolation.workers import Workers
from fuligo.environments.load import load_environment
from tests.unit.environments.tools.conftest import sandbox_problem

PATH = f"{Path(__file__).parents[4] / 'examples' / 'code' / 'environment.py'}:Code"
PROGRAM = "import time\nstart = time.monotonic()\ntime.sleep(0.2)\nprint(start, time.monotonic())"


@pytest.fixture
def sandbox() -> None:
    if (problem := sandbox_problem()) is not None:
        pytest.skip(problem)


@pytest.mark.long
@pytest.mark.usefixtures("sandbox")
async def test_programs_of_all_episodes_share_one_interpreter_and_its_limit() -> None:
    settings = {"python": {"max_running": 1}}
    loaded = load_environment(PATH, settings)
    workers = Workers(PATH, settings)
    workers.start()
    factory = IsolatedFactory(loaded.kind, loaded.settings, workers)
    turn = AssistantTurn("", tool_calls=(ToolCall("python", {"code": PROGRAM}, "a"),))
    try:
        environments = [factory.make(Row("q", "", {}, number)) for number in range(4)]
        await asyncio.gather(*(each.reset() for each in environments))
        steps = await asyncio.gather(*(each.step(turn) for each in environments))
        assert workers._spawner.process is not None
        starters = [
            each for each in psutil.Process(workers._spawner.process.pid).children() if "sandbox.interpreter" in " ".join(each.cmdline())
        ]
        assert len(starters) == 1
        spans = sorted(tuple(map(float, step.tool_results[0].text.split())) for step in steps)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        await asyncio.gather(*(each.close() for each in environments))
    finally:
        await factory.close()
