"""Returns of episodes that are rewarded by turn, against their definition as sums over later turns."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.types import TrainSample, TurnReward
from tests.random_samples import train_sample
from tests.unit.algorithms.test_gae import by_definition
from tests.unit.docs.pages import REPOSITORY, code_blocks

DISCOUNT = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def settings(estimator: str, **changes: float) -> AdvantageSettings:
    return AdvantageSettings(samples_per_step=1000, estimator=estimator, rewards_by_turn=True, **changes)


@st.composite
def episodes(draw: st.DrawFn) -> list[list[TrainSample]]:
    """Draw episodes of up to three samples, each with turns, tool output between them, and masks that miss some of a turn's tokens."""
    found = []
    for index in range(draw(st.integers(1, 3))):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            mask: list[int] = []
            turns = []
            for _ in range(draw(st.integers(1, 3))):
                mask += [0] * draw(st.integers(0, 2)) + draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
                turns.append(TurnReward(len(mask), draw(st.floats(-2, 2, width=16))))
            rng = np.random.default_rng(draw(st.integers(0, 1000)))
            parts.append(replace(train_sample(index, 0, loss_mask=mask, rng=rng), turn_rewards=tuple(turns)))
        found.append(parts)
    return found


def in_order(parts: list[TrainSample], attribute: str) -> np.ndarray:
    return np.concatenate([getattr(part, attribute) for part in parts])


def rewards_of_decisions(parts: list[TrainSample]) -> np.ndarray:
    """Return the reward of each trained token: those of the turns that ended after it and before the next trained token or turn."""
    mask = in_order(parts, "loss_mask")
    rewards, start = np.zeros(len(mask)), 0
    for part in parts:
        for turn in part.turn_rewards or ():
            place = start + turn.end - 1
            while place >= 0 and not mask[place]:
                place -= 1
            if place >= 0:
                rewards[place] += turn.reward
        start += part.response_length
    return rewards[mask != 0]


@given(episodes(), DISCOUNT)
def test_reinforce_returns_are_discounted_sums_of_later_turns(drawn: list[list[TrainSample]], gamma: float) -> None:
    assign_advantages([part for parts in drawn for part in parts], settings("reinforce_plus_plus", gamma=gamma))
    for parts in drawn:
        rewards, mask = rewards_of_decisions(parts), in_order(parts, "loss_mask")
        expected = [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
        np.testing.assert_allclose(in_order(parts, "advantages")[mask != 0], expected, atol=1e-5)
        assert not in_order(parts, "advantages")[mask == 0].any()


@given(episodes(), DISCOUNT, DISCOUNT)
def test_generalized_advantages_run_through_the_samples_of_an_episode(drawn: list[list[TrainSample]], gamma: float, lambd: float) -> None:
    assign_advantages([part for parts in drawn for part in parts], settings("ppo", gamma=gamma, lambd=lambd))
    for parts in drawn:
        mask, values = in_order(parts, "loss_mask"), in_order(parts, "values").astype(np.float64)
        expected = by_definition(rewards_of_decisions(parts), values[mask != 0], gamma, lambd)
        np.testing.assert_allclose(in_order(parts, "advantages")[mask != 0], expected, atol=1e-5)
        np.testing.assert_allclose(in_order(parts, "returns")[mask != 0], expected + values[mask != 0], atol=1e-5)


def test_a_turn_is_credited_with_its_own_and_later_rewards() -> None:
    sample = replace(
        train_sample(0, 0, loss_mask=[1, 1, 0, 1, 0, 1]), turn_rewards=(TurnReward(2, 1.0), TurnReward(4, 0.0), TurnReward(6, 4.0))
    )
    assign_advantages([sample], settings("reinforce_plus_plus"))
    assert sample.advantages.tolist() == [5.0, 5.0, 0.0, 4.0, 0.0, 4.0]


def test_without_the_flag_the_reward_stands_at_the_end_of_each_sample() -> None:
    parts = [replace(train_sample(0, 0, reward=5.0), turn_rewards=(TurnReward(3, reward),)) for reward in (1.0, 4.0)]
    assign_advantages(parts, replace(settings("reinforce_plus_plus"), rewards_by_turn=False))
    assert [part.advantages.tolist() for part in parts] == [[5.0] * 3] * 2


def test_episodes_without_rewards_by_turn_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"cannot place the rewards of sample 7 by turn: .*; remove --turn-rewards"):
        assign_advantages([train_sample(7, 0)], settings("ppo"))


def test_the_function_of_the_page_compares_what_a_turn_led_to_with_its_group() -> None:
    page = REPOSITORY / "docs" / "environments.md"
    (source,) = (block.text for block in code_blocks(page) if "def advantages(args, samples)" in block.text)
    names: dict[str, Any] = {}
    exec(source, names)
    split = [replace(train_sample(0, 0, reward=5.0), turn_rewards=(TurnReward(3, reward),)) for reward in (1.0, 4.0)]
    other = replace(train_sample(1, 0, reward=1.0, loss_mask=[1, 0, 1]), turn_rewards=(TurnReward(1, 0.0), TurnReward(3, 1.0)))
    custom = partial(names["advantages"], None)
    assign_advantages([*split, other], AdvantageSettings(samples_per_step=2, custom=custom))
    assert [each.advantages.tolist() for each in (*split, other)] == [[2.0] * 3, [1.0] * 3, [-2.0] * 3]
