import asyncio
import random
from importlib.util import find_spec
from typing import Any

import pytest

from fuligo.environments.adapters.textarena import TextArena, TextArenaSettings
from fuligo.environments.environment import AssistantTurn, Row, Step
from fuligo.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("textarena") is None, reason="`make install-dev` installs textarena")

SETTINGS = TextArenaSettings(game="GuessTheNumber-v0", arguments={"max_number": 16, "max_turns": 8})


def game(seed: Any, settings: TextArenaSettings = SETTINGS) -> TextArena:
    return TextArena(Row("", None, {"seed": seed}, 0), settings)


async def play(environment: TextArena) -> tuple[list[str], Step]:
    """Guess by bisection; return what the game said, and the last step."""
    start = await environment.reset()
    said = [start.messages[0]["content"]]
    low, high = 1, 16
    while True:
        guess = (low + high) // 2
        step = await environment.step(AssistantTurn(f"I guess [{guess}]"))
        if step.done:
            return said, step
        said.append(step.messages[0]["content"])
        low, high = (guess + 1, high) if "higher" in said[-1] else (low, guess - 1)
        await asyncio.sleep(0)


async def test_bisection_wins():
    for seed in range(5):
        said, last = await play(game(seed))
        assert "between 1 and 16" in said[0]
        assert all("target number is" in text for text in said[1:])
        assert (last.reward, last.metrics) == (1.0, {"game/invalid_move": 0.0})


async def test_seed_decides_the_game_whatever_runs_beside_it():
    alone = [await play(game(seed)) for seed in range(6)]
    random.seed(5)
    state = random.getstate()
    together = await asyncio.gather(*(play(game(seed)) for seed in range(6)))
    assert together == alone
    assert random.getstate() == state
    assert len({len(said) for said, _ in alone}) > 1


async def test_invalid_moves_end_the_game():
    environment = game(1)
    await environment.reset()
    for _ in range(8):
        step = await environment.step(AssistantTurn("no number"))
        if step.done:
            break
    assert (step.done, step.metrics) == (True, {"game/invalid_move": 1.0})


async def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="cannot play Guess-v9: Environment Guess-v9-raw not found"):
        game(1, TextArenaSettings(game="Guess-v9"))
    with pytest.raises(ConfigError, match=r"cannot play GuessTheNumber-v0: .*unexpected keyword argument 'x'"):
        game(1, TextArenaSettings(game="GuessTheNumber-v0", arguments={"x": 1}))
    with pytest.raises(ConfigError, match="no integer `seed`"):
        game(None)
    with pytest.raises(ConfigError, match="not a game for one player"):
        await game(1, TextArenaSettings(game="TicTacToe-v0")).reset()
