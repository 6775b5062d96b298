r"""Single-player games of TextArena.

    fuligo train --environment fuligo.environments.adapters.textarena.TextArena --environment-settings '{game: GuessTheNumber-v0}' \
        --metadata-key metadata ...

A row's metadata holds the game's `seed`, so that the samples of one prompt play the same game. The model does not see the row's prompt; the
game provides one.
"""

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field

from fuligo.environments.environment import AssistantTurn, Environment, EnvironmentSettings, Row, Start, Step
from fuligo.errors import ConfigError


class TextArenaSettings(EnvironmentSettings):
    """Game and its constructor arguments."""

    game: str
    """Name in TextArena's registry, such as `GuessTheNumber-v0`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the game's class, such as `max_number`."""


class TextArena(Environment):
    """Environment of one game, which gives a reward at its end. The metric `game/invalid_move` is 1 if an invalid move ended it."""

    Settings: ClassVar[type[EnvironmentSettings]] = TextArenaSettings

    def __init__(self, row: Row, settings: TextArenaSettings) -> None:
        """Create the game. Raises ConfigError if textarena, the game or the row's seed is missing, or the arguments are invalid."""
        super().__init__(row, settings)
        try:
            textarena = importlib.import_module("textarena")
        except ImportError:
            raise ConfigError("cannot play: textarena is not installed; pip install 'fuligo[textarena]'") from None
        seed = row.metadata.get("seed")
        if not isinstance(seed, int):
            raise ConfigError(
                f"cannot play {settings.game}: the row's metadata has no integer `seed`; add it to the prompt file, and set --metadata-key"
            )
        self._random = random.Random(seed).getstate()
        self._seed = seed
        name = settings.game if settings.game.endswith("-raw") else f"{settings.game}-raw"
        try:
            self._game = textarena.make(name, **settings.arguments)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"cannot play {settings.game}: {error}; correct `game` or `arguments` of --environment-settings") from None

    async def reset(self) -> Start:
        with self._own_random():
            try:
                self._game.reset(num_players=1, seed=self._seed)
            except AssertionError as error:
                raise ConfigError(f"cannot play {self.settings.game}: it is not a game for one player ({error}); choose another") from None
        return Start([{"role": "user", "content": self._observe()}])

    async def step(self, turn: AssistantTurn) -> Step:
        with self._own_random():
            done, _ = self._game.step(action=turn.content)
        if not done:
            return Step([{"role": "user", "content": self._observe()}])
        rewards, information = self._game.close()
        return Step(reward=float(rewards[0]), done=True, metrics={"game/invalid_move": float(bool(information[0]["invalid_move"]))})

    def _observe(self) -> str:
        """Return the game's messages since the last turn. The model's own moves are left out: they are in its context already."""
        player, observations = self._game.get_observation()
        return "\n".join(text for speaker, text, _ in observations if speaker != player).strip()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Run the block with this game's state of Python's global random generator, which all games use."""
        shared = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(shared)
