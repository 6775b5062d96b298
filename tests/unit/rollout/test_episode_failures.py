"""Environments that raise, hang, exit or return something else fail their own sample, with the reason, and nothing more."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator

import pytest

from fuligo.environments import AssistantTurn, Environment, EnvironmentSettings, Row, Start, Step, ToolEnvironment
from fuligo.environments.isolation import workers
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.rollout import environment_calls
from fuligo.types import Sample, SampleStatus
from tests.unit.rollout.episode_environments import Broken
from tests.unit.rollout.episode_world import PARAMS, Writer, episodes, fresh, run


def exits(seconds: float) -> None:
    """Exit the program."""
    raise SystemExit(3)


async def exits_at_once(seconds: float) -> None:
    """Exit the program."""
    raise SystemExit(3)


def ends_early(seconds: float) -> None:
    """Raise what a future cannot hold."""
    raise StopIteration


HANGING = threading.Event()


def hangs(seconds: float) -> None:
    """Wait forever."""
    HANGING.wait()


class Calling(ToolEnvironment):
    """Offers the tools above."""

    def __init__(self, row: Row, settings: EnvironmentSettings) -> None:
        super().__init__(row, settings, [exits, exits_at_once, ends_early, hangs])

    async def judge(self, turn: AssistantTurn) -> Step:
        return Step(reward=1.0, done=True)


def calling(name: str, num_calls: int = 1) -> Writer:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"seconds": 1}}}}\n</tool_call>'
    return Writer([*[f"{call}<|im_end|>"] * num_calls, "5<|im_end|>"])


@pytest.mark.parametrize(
    ("tool", "error"), [("exits", "error: 3"), ("exits_at_once", "error: 3"), ("ends_early", "error: StopIteration: ")]
)
def test_a_tool_that_exits_fails_only_its_call(tool: str, error: str) -> None:
    (sample,) = run(calling(tool), Calling)
    assert sample.episode is not None
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0)
    assert sample.episode.turns[0].answers[0]["content"] == error


def test_tools_that_hang_hold_up_no_other_thread() -> None:
    async def run_many() -> list[Sample]:
        runner = episodes(calling("hangs", 40), Calling, turn_timeout_s=0.2)
        samples = await asyncio.gather(*(runner(fresh(), PARAMS) for _ in range(40)))
        await asyncio.wait_for(asyncio.to_thread(int), 60)
        return [sample for (sample,) in samples]

    try:
        samples = asyncio.run(run_many())  # waits for the threads of asyncio.to_thread
    finally:
        HANGING.set()
    assert all("did not return within" in str(sample.error) for sample in samples)


class Stubborn(Environment):
    """Hangs in `step` and ignores every cancellation."""

    async def reset(self) -> Start:
        return Start([{"role": "user", "content": "q"}])

    async def step(self, turn: AssistantTurn) -> Step:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedFactory]:
    """Start processes for the class below, which the cases share."""
    started = workers.Workers(f"{Broken.__module__}.Broken", {})
    started.start()
    yield IsolatedFactory(Broken, EnvironmentSettings(), started)
    started.close()


@pytest.mark.parametrize("has_processes", [False, True])
@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("raises", "environment: step raised RuntimeError: no such game"),
        ("hangs", r"environment: step did not return within 1 s \(--turn-timeout-s\)"),
        pytest.param("ignores its cancellation", r"environment: step did not return within 1 s", marks=pytest.mark.long),
        ("exits", "environment: step raised SystemExit: 3"),
        ("is interrupted", "environment: step raised KeyboardInterrupt"),
        ("has no text", "environment: step raised NoText$"),
        ("raises a cancellation", "environment: step canceled itself"),
        ("cancels itself", "environment: step canceled itself"),
        ("exits at once", "environment: the constructor raised SystemExit: 3"),
        ("resets to text", r"environment: the messages of reset must be a list of dicts with a role, not \['q'\]"),
        ("offers text", r"environment: the tools of reset must be a tuple of Tool, not \('add',\)"),
        ("gives text as a metric", "environment: the metrics of step must be finite numbers by name, not {'speed': 'fast'}"),
        ("gives no metrics", r"environment: the metrics of step must be finite numbers by name, not \[1.0\]"),
        ("gives text as a result", r"environment: the tool_results of step must be a tuple of ToolResult, not \('4',\)"),
        ("gives text as a message", r"environment: the messages of step must be a list of dicts with a role, not \['4'\]"),
        ("says nothing", "step returned no message"),
        ("gives no number", "the reward of turn 1 is nan"),
        ("gives several numbers", r"the reward of turn 1 is array\(\[1., 1.\]\); it must be finite"),
        ("gives a number of 400 digits", "the reward of turn 1 is 10{79}; it must be finite"),
        ("gives no step", "step must return a Step, not None"),
        ("says what no template renders", "environment: the chat template rejects the messages"),
    ],
)
async def test_an_environment_that_fails_fails_only_its_sample(
    prompt: str, error: str, has_processes: bool, isolated: IsolatedFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "ignores" in prompt:
        monkeypatch.setattr(workers, "_CANCEL_S", 0.2)
    template = "deepseekv3" if "template" in prompt else "CHATML"
    turn_timeout_s = 1.0 if "did not return" in error else 60.0
    factory = isolated if has_processes else None
    runner = episodes(Writer(["a<|im_end|>", "a<|im_end|>"]), Broken, template, factory, turn_timeout_s=turn_timeout_s)
    (bad,), (good,) = await asyncio.gather(runner(fresh(prompt), PARAMS), runner(fresh("works"), PARAMS))
    assert bad.status is SampleStatus.FAILED and bad.error is not None
    assert re.search(error, bad.error), bad.error
    assert (good.status, good.reward) == (SampleStatus.COMPLETED, 1.0)


@pytest.mark.long
def test_a_call_that_ignores_its_cancellation_does_not_outlive_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_calls, "_END_S", 0.2)

    async def run_and_close() -> Sample:
        runner = episodes(Writer(["a<|im_end|>"]), Stubborn, turn_timeout_s=0.05)
        (sample,) = await runner(fresh(), PARAMS)
        await runner.close()
        return sample

    assert "did not return within" in str(asyncio.run(run_and_close()).error)  # asyncio.run waits for every task that is registered
    assert "abandoned 1 environment call that caught asyncio.CancelledError and continued" in caplog.text


async def test_an_episode_that_takes_too_long_fails() -> None:
    (sample,) = await episodes(Writer(["a<|im_end|>"]), Broken, episode_timeout_s=0.05)(fresh("hangs"), PARAMS)
    assert sample.error == "the episode did not end within 0.05 s (--episode-timeout-s)"
