"""Continuous sampling, killed and resumed anywhere: no prompt is lost or used twice, and no token is older than allowed."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.types import SampleStatus
from tests.unit.rollout.continuous_world import ContinuousWorld, continuous, saved
from tests.unit.rollout.scripted import Rows, ScriptedEngine, ScriptedReward, samples_of, token


@st.composite
def runs(draw: st.DrawFn) -> dict:
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "drop_share": draw(st.sampled_from([0.0, 0.3, 0.6])),
        "fail_share": draw(st.sampled_from([0.0, 0.1])),
        "kills": draw(st.lists(st.integers(0, 6), max_size=2)),
        "train_ticks": draw(st.sampled_from([0, 5, 40, 200])),
        "longest": draw(st.sampled_from([10, 40, 150])),
        "flags": {
            "rollout_batch_size": draw(st.integers(1, 4)),
            "n_samples_per_prompt": draw(st.integers(1, 3)),
            "max_staleness": draw(st.integers(0, 3)),
            "update_interval": draw(st.integers(1, 2)),
            "sampling_order": draw(st.sampled_from(["first-finished", "submission"])),
            "rollout_concurrency": draw(st.sampled_from([1, 5, 100])),
            "rollout_max_response_len": 100,
            "num_rollout": draw(st.sampled_from([8, 1000])),
        },
    }


def chance(seed: int, *what: int) -> float:
    return np.random.default_rng([seed, *what]).random()


def make(run: dict, state: RolloutState | None, version: int) -> ContinuousWorld:
    seed = run["seed"]
    return continuous(
        engine=ScriptedEngine(
            lengths=lambda row, index: 1 + int(run["longest"] * chance(seed, 0, index)),
            refuse=lambda index: chance(seed, 1, index) < run["fail_share"],
            version=version,
        ),
        reward=ScriptedReward(ticks=lambda row: int(20 * chance(seed, 3, row))),
        rows=Rows(10_000),
        group_filter=lambda samples: "dull" if chance(seed, 2, samples[0].group_index) < run["drop_share"] else None,
        state=state,
        **run["flags"],
    )


async def play(run: dict, num_rollouts: int = 8) -> list[tuple[Rollout, int]]:
    """Return rollouts, each with the version that trained on it. The run is killed after the rollouts in `kills` and resumed one before."""
    history: list[tuple[Rollout, int]] = []
    kills = sorted(run["kills"])
    world = make(run, None, 0)
    while len(history) < num_rollouts:
        step, version = len(history), world.engine.version
        history.append((await world.step(step, run["train_ticks"]), version))
        if kills and kills[0] == step:
            kills.pop(0)
            await world.runner.close()
            _, version = history.pop()
            world = make(run, saved(history[-1][0].state) if history else None, version)
    await world.runner.close()
    return history


MANY_DROPPED_AND_SOME_FAILED = {
    "seed": 59297,
    "drop_share": 0.6,
    "fail_share": 0.1,
    "kills": [],
    "train_ticks": 0,
    "longest": 10,
    "flags": {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "max_staleness": 0,
        "update_interval": 1,
        "sampling_order": "first-finished",
        "rollout_concurrency": 100,
        "rollout_max_response_len": 100,
        "num_rollout": 1000,
    },
}
"""A rollout fills only after eight groups have failed, among many that are dropped and many that are good."""


@pytest.mark.long
@settings(max_examples=settings().max_examples // 4)
@given(runs())
@example(MANY_DROPPED_AND_SOME_FAILED)
def test_every_prompt_ends_once_and_nothing_is_too_old(run: dict):
    history = asyncio.run(play(run))
    flags = run["flags"]
    rollouts = [rollout for rollout, _ in history]

    assert all(len(rollout.kept) == flags["rollout_batch_size"] for rollout in rollouts)
    for rollout, version in history:
        for sample in samples_of(rollout.kept):
            assert (sample.versions >= version - flags["max_staleness"]).all()
            assert (sample.versions <= version).all()
        assert rollout.metrics["rollout/staleness_max"] <= flags["max_staleness"]

    ended = [group for rollout in rollouts for group in rollout.groups if group.drop_reason != "stale"]
    state = rollouts[-1].state
    waiting, position = state.source["returned"], state.source["position"]
    assert isinstance(waiting, list) and isinstance(position, int)
    rows = [group.row for group in [*ended, *state.buffer]] + waiting
    assert Counter(rows) == Counter(range(position)), "each prompt drawn ended once, or waits once"

    everything = [*state.buffer, *(group for rollout in rollouts for group in rollout.groups)]
    assert max(Counter(group.index for group in everything).values()) == 1
    assert max(Counter(sample.index for sample in samples_of(everything)).values()) == 1
    assert all(len(group.samples) == flags["n_samples_per_prompt"] for group in everything)
    for sample in samples_of([group for group in ended if group.kept]):
        if sample.status is not SampleStatus.FAILED:
            assert sample.response_ids.tolist() == [token(sample.index, position) for position in range(sample.response_length)]
            assert (np.diff(sample.versions) >= 0).all(), "tokens are in the order of the weights that made them"
            assert len(sample.engine_logprobs) == len(sample.loss_mask) == sample.response_length
