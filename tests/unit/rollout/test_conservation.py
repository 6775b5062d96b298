"""No prompt or sample is lost or used twice, in whatever order groups finish or are dropped, and wherever the run is killed and resumed."""

import asyncio
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.rollout.debug_data import decode_groups, encode_groups
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.types import SampleStatus
from tests.unit.rollout.scripted import Rows, ScriptedEngine, ScriptedReward, World, samples_of, token, world


@st.composite
def runs(draw: st.DrawFn) -> dict:
    target = draw(st.integers(1, 4))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "drop_share": draw(st.sampled_from([0.0, 0.3, 0.6])),
        "fail_share": draw(st.sampled_from([0.0, 0.1])),
        "kills": draw(st.lists(st.integers(0, 4), max_size=2)),
        "flags": {
            "rollout_batch_size": target,
            "over_sampling_batch_size": target + draw(st.integers(0, 4)),
            "n_samples_per_prompt": draw(st.integers(1, 3)),
            "partial_rollout": draw(st.booleans()),
            "sampling_order": draw(st.sampled_from(["first-finished", "submission"])),
            "rollout_concurrency": draw(st.sampled_from([2, 5, 100])),
            "rollout_max_response_len": 25,
            "max_staleness": draw(st.sampled_from([None, 1])),
        },
    }


def chance(seed: int, *what: int) -> float:
    return np.random.default_rng([seed, *what]).random()


def make(run: dict, state: RolloutState | None, version: int) -> World:
    seed, flags = run["seed"], dict(run["flags"])
    if not flags["partial_rollout"]:
        flags["max_staleness"] = None
    return world(
        engine=ScriptedEngine(
            lengths=lambda row, index: 1 + int(40 * chance(seed, 0, index)),
            refuse=lambda index: chance(seed, 1, index) < run["fail_share"],
            version=version,
        ),
        reward=ScriptedReward(ticks=lambda row: int(20 * chance(seed, 3, row))),
        rows=Rows(10_000),
        group_filter=lambda samples: "dull" if chance(seed, 2, samples[0].group_index) < run["drop_share"] else None,
        state=state,
        **flags,
    )


async def play(run: dict, num_rollouts: int = 5) -> list[Rollout]:
    """Run some rollouts with a weight sync after each; kill the run after the rollouts in `kills` and resume it one before."""
    history: list[Rollout] = []
    kills = sorted(run["kills"])
    given = make(run, None, 0)
    while len(history) < num_rollouts:
        history.append(await given.runner.rollout(len(history)))
        given.engine.version += 1
        if kills and kills[0] == history[-1].step:
            kills.pop(0)
            history.pop()
            state = history[-1].state if history else None
            if state is not None:
                state = RolloutState(
                    state.source, state.next_sample_index, state.next_group_index, decode_groups(encode_groups(state.buffer))
                )
            given = make(run, state, len(history))
    return history


@settings(max_examples=40, deadline=None)
@given(runs())
def test_every_prompt_and_sample_is_accounted_for_exactly_once(run: dict):
    history = asyncio.run(play(run))
    size, n = run["flags"]["rollout_batch_size"], run["flags"]["n_samples_per_prompt"]

    assert all(len(rollout.kept) == size for rollout in history)
    final = [group for rollout in history for group in rollout.groups if group.drop_reason != "aborted"]
    state = history[-1].state
    waiting, position = state.source["returned"], state.source["position"]
    assert isinstance(waiting, list) and isinstance(position, int)
    rows = [group.row for group in final] + [group.row for group in state.buffer] + waiting
    assert Counter(rows) == Counter(range(position)), "each prompt drawn ended once, or waits once"

    assert max(Counter(group.index for group in final).values()) == 1
    assert max(Counter(sample.index for sample in samples_of(final)).values()) == 1
    assert all(len(group.samples) == n for group in final)
    for sample in samples_of([group for group in final if group.kept]):
        if sample.status is not SampleStatus.FAILED:
            assert sample.response_ids.tolist() == [token(sample.index, position) for position in range(sample.response_length)]
            assert (np.diff(sample.versions) >= 0).all(), "tokens are in the order of the weights that made them"
            assert len(sample.engine_logprobs) == len(sample.loss_mask) == sample.response_length
