"""Matches of two episodes, and the game of examples/self_play."""

import asyncio
import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.environments import AssistantTurn, Matches, Row

EXAMPLE = Path(__file__).parents[3] / "examples" / "self_play" / "environment.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_self_play", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def player(example: Any, index: int, stones: int, **metadata: Any) -> Any:
    return example.NimPlayer(Row("", stones, metadata, index), example.Settings())


async def play(environment: Any, moves: list[str]) -> tuple[list[int], float, dict[str, float]]:
    """Play to the end, the last move again and again, or the best ones if there are none; return the heaps seen, reward and metrics."""
    heaps, reward = [], 0.0
    messages, turn = (await environment.reset()).messages, 0
    while True:
        heaps.append(int(messages[-1]["content"].split()[0]))
        move = moves[min(turn, len(moves) - 1)] if moves else str(heaps[-1] % 4)
        step = await environment.step(AssistantTurn(move))
        turn, reward, messages = turn + 1, reward + step.reward, step.messages
        if step.done:
            await environment.close()
            return heaps, reward, dict(step.metrics)


async def test_two_episodes_play_one_game(example: Any) -> None:
    first, second = player(example, 6, 9), player(example, 7, 9)
    one, two = await asyncio.gather(play(first, ["1", "3", "2"]), play(second, ["2", "1", "3"]))
    assert one == ([9, 6, 2], 1.0, {"game/best_moves": 2 / 3, "game/illegal": 0.0})  # 6 stones: 2, not 3, would have been best
    assert two == ([8, 3], 0.0, {"game/best_moves": 0.0, "game/illegal": 0.0})


@given(stones=st.integers(5, 16), moves=st.lists(st.lists(st.sampled_from(["1", "2", "3", "no"]), min_size=1), min_size=2, max_size=2))
def test_one_of_two_wins_whatever_they_play(example: Any, stones: int, moves: list[list[str]]) -> None:
    async def both() -> list[Any]:
        pair = [player(example, index, stones) for index in (0, 1)]
        return await asyncio.gather(*(play(each, given) for each, given in zip(pair, moves, strict=True)))

    (seen, reward, metrics), (other_seen, other_reward, other_metrics) = asyncio.run(both())
    assert reward + other_reward == 1.0 - 0.25 * (metrics["game/illegal"] + other_metrics["game/illegal"])
    heaps = sorted(seen + other_seen, reverse=True)
    assert heaps[0] == stones and all(0 < before - after <= 3 for before, after in pairwise(heaps))


async def test_against_the_perfect_opponent_only_perfect_play_wins(example: Any) -> None:
    for index, stones in enumerate((6, 9, 15)):
        _, reward, metrics = await play(player(example, index, stones, opponent="perfect"), [])
        assert (reward, metrics) == (1.0, {"game/best_moves": 1.0, "game/illegal": 0.0})
    heaps, reward, metrics = await play(player(example, 0, 5, opponent="perfect"), ["2"])
    assert (reward, metrics["game/best_moves"]) == (0.0, 0.0)
    assert heaps == [5]


async def test_a_player_whose_partner_leaves_is_told(example: Any) -> None:
    first, second = player(example, 0, 9), player(example, 1, 9)
    await first.reset()
    waiting = asyncio.create_task(second.reset())
    await asyncio.sleep(0)
    await first.close()
    with pytest.raises(RuntimeError, match="cannot continue the game: the other player's episode ended before the game"):
        await waiting


async def test_players_that_start_over_meet_in_a_new_match() -> None:
    matches = Matches[list[int]]()
    lost = matches.join(4, list)
    await lost.leave()
    again, partner = matches.join(4, list), matches.join(5, list)
    assert again.game is partner.game is not lost.game
    assert not matches._open
    await again.turn()
    await again.moved(is_over=True)
    await partner.turn()
    assert partner.is_over
