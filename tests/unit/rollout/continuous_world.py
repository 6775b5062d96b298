"""Test world of a `ContinuousRunner`: a trainer that takes some ticks, a weight sync that interrupts the engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuligo.config.groups import RolloutFlags
from fuligo.rollout.continuous import Admission, ContinuousRunner
from fuligo.rollout.debug_data import decode_groups, encode_groups
from fuligo.rollout.generate import SingleTurn, sampling_params
from fuligo.rollout.protocol import GenerateFn, GroupFilter, Rollout, RolloutState
from fuligo.rollout.runner import RunnerParts
from fuligo.rollout.sampler import Sampler, Turns
from fuligo.rollout.source import GroupSource
from fuligo.types import SampleGroup
from tests.unit.rollout.scripted import Rows, ScriptedEngine, ScriptedReward, Tokenizer


@dataclass
class ContinuousWorld:
    engine: ScriptedEngine
    rows: Rows
    reward: ScriptedReward
    runner: ContinuousRunner
    update_interval: int = 1

    async def sync(self) -> None:
        """Abort running requests, hold new ones, and continue with the next version, as `WeightSync` does."""
        self.runner.before_sync()
        await self.engine.pause("abort")
        await self.engine.abort_all()
        await self.engine.until(lambda: self.engine.num_running == 0)
        self.engine.version += 1
        await self.engine.resume()

    async def step(self, step: int, ticks: int = 10) -> Rollout:
        """Run one step of the loop: take a rollout, train on it for some ticks, sync when due."""
        rollout = await self.runner.rollout(step)
        await pass_ticks(ticks)
        if (step + 1) % self.update_interval == 0:
            await self.sync()
        return rollout

    async def steps(self, num_steps: int, *, start: int = 0, ticks: int = 10) -> list[Rollout]:
        return [await self.step(step, ticks) for step in range(start, start + num_steps)]


async def pass_ticks(num_ticks: int) -> None:
    for _ in range(num_ticks):
        await asyncio.sleep(0)


def continuous(
    *,
    engine: ScriptedEngine | None = None,
    reward: ScriptedReward | None = None,
    rows: Rows | None = None,
    group_filter: GroupFilter | None = None,
    sample_filter: Callable[[list[SampleGroup]], None] | None = None,
    generate: GenerateFn | None = None,
    state: RolloutState | None = None,
    max_staleness: int = 1,
    update_interval: int = 1,
    num_rollout: int = 1000,
    timeout_s: float = 20.0,
    **flags: Any,
) -> ContinuousWorld:
    engine, reward, rows = engine or ScriptedEngine(), reward or ScriptedReward(), rows or Rows()
    given = RolloutFlags(
        **{
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "async_mode": "full",
            "max_staleness": max_staleness,
            **flags,
        }
    )
    turns = Turns(given.rollout_concurrency or 512)
    single_turn = SingleTurn(engine, Tokenizer(), timeout_s=timeout_s)
    parts = RunnerParts(
        source=GroupSource(rows, given.n_samples_per_prompt),
        sampler=Sampler(generate or single_turn, seed=1, stream="train", turns=turns, timeout_s=timeout_s),
        reward=reward,
        engines=engine,
        params=sampling_params(given),
        flags=given,
        concurrency=given.rollout_concurrency or 512,
        group_filter=group_filter,
        sample_filter=sample_filter,
        policy_version=lambda: engine.version,
    )
    runner = ContinuousRunner(parts, admission=Admission(given.rollout_batch_size, max_staleness, update_interval, num_rollout))
    if state is not None:
        runner.restore(state)
    return ContinuousWorld(engine, rows, reward, runner, update_interval)


def saved(state: RolloutState) -> RolloutState:
    """Return the state as a checkpoint restores it."""
    return RolloutState(state.source, state.next_sample_index, state.next_group_index, decode_groups(encode_groups(state.buffer)))
