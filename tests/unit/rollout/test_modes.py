"""Order of rollouts, training and weight syncs."""

import asyncio
from typing import Literal

import pytest

from fuligo.errors import EngineError
from fuligo.rollout.producer import PacedRollouts
from fuligo.rollout.protocol import Rollout, RolloutState
from tests.unit.rollout.scripted import ScriptedEngine, World, samples_of, world


class Recorded:
    """Producer of empty rollouts that take some time; records when each begins and ends."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def __call__(self, step: int) -> Rollout:
        self.log.append(f"begin {step}")
        for _ in range(20):
            await asyncio.sleep(0)
        self.log.append(f"end {step}")
        return Rollout(step, [], RolloutState({}), {})

    async def train(self, rollouts: PacedRollouts, ticks: int = 5) -> None:
        async for rollout in rollouts:
            self.log.append(f"train {rollout.step}")
            for _ in range(ticks):
                await asyncio.sleep(0)
            await rollouts.settle()
            self.log.append(f"sync {rollout.step + 1}")


async def test_sync_samples_each_rollout_when_it_is_asked_for():
    given = Recorded()
    await given.train(PacedRollouts(given, start=0, stop=2))
    assert given.log == [
        "begin 0", "end 0", "train 0", "sync 1",
        "begin 1", "end 1", "train 1", "sync 2",
    ]  # fmt: skip


@pytest.mark.parametrize("ticks", [5, 50], ids=["training is faster", "sampling is faster"])
async def test_one_step_samples_the_next_rollout_meanwhile_and_weights_change_between_rollouts_only(ticks: int):
    given = Recorded()
    await given.train(PacedRollouts(given, start=0, stop=3, mode="one-step"), ticks)
    assert given.log == [
        "begin 0", "end 0",
        "train 0", "begin 1", "end 1", "sync 1",
        "train 1", "begin 2", "end 2", "sync 2",
        "train 2", "sync 3",
    ]  # fmt: skip


async def test_a_resumed_run_starts_where_it_stood():
    given = Recorded()
    steps = [rollout.step async for rollout in PacedRollouts(given, start=3, stop=5, mode="one-step")]
    assert steps == [3, 4]


async def test_nothing_is_sampled_when_all_rollouts_are_done():
    given = Recorded()
    assert [rollout async for rollout in PacedRollouts(given, start=5, stop=5)] == []
    assert given.log == []


async def test_an_error_ahead_of_time_comes_when_its_rollout_is_asked_for():
    async def produce(step: int) -> Rollout:
        if step == 1:
            raise EngineError("engine gone")
        return Rollout(step, [], RolloutState({}), {})

    rollouts = PacedRollouts(produce, start=0, stop=3, mode="one-step")
    assert (await anext(rollouts)).step == 0
    await rollouts.settle()
    with pytest.raises(EngineError, match="engine gone"):
        await anext(rollouts)


async def test_leaving_early_cancels_the_rollout_that_is_ahead():
    given = world(engine=ScriptedEngine(lambda row, index: 1000), rollout_max_response_len=1000)
    rollouts = PacedRollouts(given.runner.rollout, start=0, stop=9, mode="one-step")
    async for _ in rollouts:
        await given.engine.until(lambda: given.engine.num_running > 0)
        break
    await rollouts.close()
    assert given.engine.num_running == 0
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("mode", ["sync", "one-step"])
async def test_an_early_end_cancels_the_rollout_that_the_loop_waits_for(mode: Literal["sync", "one-step"]) -> None:
    given, end = world(engine=ScriptedEngine(lambda row, index: 1000), rollout_max_response_len=1000), asyncio.Event()
    rollouts = PacedRollouts(given.runner.rollout, start=0, stop=9, mode=mode, end_early=end)
    waiting = asyncio.ensure_future(anext(rollouts, None))
    await given.engine.until(lambda: given.engine.num_running > 0)
    end.set()
    assert await waiting is None
    assert given.engine.num_running == 0
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("is_late", [False, True], ids=["before settle", "in settle"])
async def test_an_early_end_in_a_step_cancels_the_rollout_ahead(*, is_late: bool) -> None:
    """Otherwise the weight sync would wait for a rollout that is not trained on, and the checkpoint after it would come too late."""
    end, begun = asyncio.Event(), asyncio.Event()

    async def produce(step: int) -> Rollout:
        if step > 0:
            begun.set()
            await asyncio.Event().wait()
        return Rollout(step, [], RolloutState({}), {})

    rollouts = PacedRollouts(produce, start=0, stop=9, mode="one-step", end_early=end)
    await anext(rollouts)
    await begun.wait()
    settling = asyncio.ensure_future(rollouts.settle()) if is_late else None
    await asyncio.sleep(0)
    end.set()
    await asyncio.wait_for(settling or rollouts.settle(), 60)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert await anext(rollouts, None) is None


async def test_an_early_end_in_a_step_lets_the_step_finish_and_hands_out_nothing_more() -> None:
    given, end = Recorded(), asyncio.Event()
    async for rollout in PacedRollouts(given, start=0, stop=9, end_early=end):
        given.log.append(f"train {rollout.step}")
        if rollout.step == 1:
            end.set()
    assert given.log == ["begin 0", "end 0", "train 0", "begin 1", "end 1", "train 1"]


def one_step(state: RolloutState | None = None, start: int = 0) -> tuple[World, PacedRollouts]:
    given = world(state=state)
    given.engine.version = max(0, start)
    return given, PacedRollouts(given.runner.rollout, start=start, stop=4, mode="one-step", policy_version=lambda: given.engine.version)


async def train(given: World, rollouts: PacedRollouts) -> list[Rollout]:
    history = []
    async for rollout in rollouts:
        history.append(rollout)
        await rollouts.settle()
        given.engine.version += 1
    return history


async def test_one_step_trains_on_tokens_of_the_version_before():
    history = await train(*one_step())
    versions = [{int(version) for sample in samples_of(rollout.kept) for version in sample.versions} for rollout in history]
    assert versions == [{0}, {0}, {1}, {2}]
    assert [rollout.metrics["rollout/staleness"] for rollout in history] == [0, 1, 1, 1]
    assert [rollout.metrics["rollout/staleness_max"] for rollout in history] == [0, 1, 1, 1]


async def test_a_resume_samples_what_was_ahead_again_with_the_same_prompts_and_numbers():
    whole = await train(*one_step())
    _, rollouts = one_step()
    first = await anext(rollouts)
    await rollouts.settle()
    await rollouts.close()
    resumed = [first, *await train(*one_step(first.state, start=1))]
    assert [[sample.index for sample in samples_of(rollout.groups)] for rollout in resumed] == [
        [sample.index for sample in samples_of(rollout.groups)] for rollout in whole
    ]
    assert [[group.row for group in rollout.groups] for rollout in resumed] == [
        [group.row for group in rollout.groups] for rollout in whole
    ]
