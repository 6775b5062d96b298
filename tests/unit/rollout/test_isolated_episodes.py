"""Episodes whose environments have processes of their own give the same samples as those in the process of the run."""

import asyncio
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from fuligo.environments.environment import Environment
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.environments.isolation.workers import Workers
from fuligo.rollout.group_tasks import snapshot
from fuligo.types import SampleStatus
from tests.unit.rollout.episode_environments import Adding, Anew, Blocking, Counting
from tests.unit.rollout.episode_world import PARAMS, Writer, episodes, fresh

KINDS: tuple[type[Environment], ...] = (Counting, Anew, Adding, Blocking)
CALLS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {number}}}}}\n</tool_call><|im_end|>'
    for name, number in (("add", 1), ("add", -1), ("sub", 2))
]
TEXTS = {Adding: [*CALLS, "2<|im_end|>"]}
COUNTED = ["<think>\nt\n</think>\n\none é<|im_end|>", "two 🙂<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>", "done<|im_end|>"]
CLOCKS = {"step_s", "generate_s", "seconds", "environment_s", "start_s", "end_s"}


@pytest.fixture(scope="module")
def factories() -> Iterator[dict[type[Environment], IsolatedFactory]]:
    made: dict[type[Environment], IsolatedFactory] = {}
    for kind in KINDS:
        workers = Workers(f"{kind.__module__}.{kind.__name__}", {})
        workers.start()
        made[kind] = IsolatedFactory(kind, kind.Settings(), workers)
    yield made
    for factory in made.values():
        factory.workers.close()


def facts(value: Any) -> Any:
    """Return plain data of a sample and all that it holds, but for clocks; arrays with their types and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: facts(each) for name, each in value.items() if name not in CLOCKS}
    if isinstance(value, list | tuple):
        return [facts(each) for each in value]
    if hasattr(type(value), "__dataclass_fields__"):
        return {field.name: facts(getattr(value, field.name)) for field in fields(value) if field.name not in CLOCKS}
    return value


def play(kind: type[Environment], template: str, abort_at: dict[int, int], factory: IsolatedFactory | None) -> tuple[list[Any], list[Any]]:
    """Play an episode, continuing it after each interruption from what a checkpoint keeps; return facts of samples and stops."""
    engine = Writer(list(TEXTS.get(kind, COUNTED)), abort_at)

    async def to_end() -> tuple[list[Any], list[Any]]:
        runner, stops = episodes(engine, kind, template, factory), []
        sample = fresh(label="2")
        while True:
            samples = await runner(sample, PARAMS)
            if samples[-1].status is not SampleStatus.ABORTED:
                return facts(samples), stops
            sample = snapshot(samples[-1])
            stops.append(facts(sample))
            engine.version += 1

    return asyncio.run(to_end())


@pytest.mark.parametrize("abort_at", [{}, {0: 1}, {1: 0}, {1: 2}, {0: 2, 3: 1}], ids=str)
@pytest.mark.parametrize("template", ["CHATML", "qwen3"])
@pytest.mark.parametrize("kind", [Counting, Anew, Adding])
def test_samples_are_the_same_as_without_processes(
    kind: type[Environment], template: str, abort_at: dict[int, int], factories: dict[type[Environment], IsolatedFactory]
) -> None:
    expected, expected_stops = play(kind, template, abort_at, None)
    samples, stops = play(kind, template, abort_at, factories[kind])
    assert samples == expected
    assert stops == expected_stops
    assert bool(stops) == bool(abort_at)
    assert samples[-1]["status"] is SampleStatus.COMPLETED


@pytest.mark.long
async def test_an_interruption_ends_a_process_that_blocks_and_its_episode_continues(
    factories: dict[type[Environment], IsolatedFactory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step blocks in the first process that makes it, and not in the one that continues the episode."""
    runner = episodes(Writer(["a<|im_end|>", "a<|im_end|>"]), Blocking, factory=factories[Blocking])
    other = asyncio.create_task(runner(fresh("passes"), PARAMS))
    task = asyncio.create_task(runner(fresh("blocks"), PARAMS))
    (passed,) = await other
    assert passed.status is SampleStatus.COMPLETED
    await asyncio.sleep(0.2)  # the step has begun, or the interruption comes before it
    runner.interrupt()
    (sample,) = await task
    assert sample.status is SampleStatus.ABORTED and sample.response_length > 0
    sample.prompt = "passes"
    (sample,) = await runner(sample, replace(PARAMS))
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0)
