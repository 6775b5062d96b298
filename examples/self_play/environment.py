"""Nim: two episodes play each other, and the same policy learns from both sides."""

import random
from dataclasses import dataclass
from typing import Literal

from fuligo.environments import AssistantTurn, Environment, EnvironmentSettings, Matches, Row, Seat, Start, Step

MOST = 3
"""Maximum number of stones that a player may take at once."""


class Settings(EnvironmentSettings):
    """Opponent of the policy, and the penalty for an answer that is not a legal move."""

    opponent: Literal["self", "perfect", "random"] = "self"
    """Opponent, unless the row's metadata names another one."""
    illegal: float = -0.25
    """Reward of an answer that is not a legal move; one stone is taken instead."""


@dataclass
class Nim:
    """Heap of stones from which players 0 and 1 take one to three in turn; the player who takes the last stone wins."""

    stones: int
    winner: int | None = None

    def take(self, player: int, number: int) -> None:
        self.stones -= number
        if self.stones == 0:
            self.winner = player

    @property
    def best(self) -> int:
        """Number of stones to take so that a multiple of four is left, with which the opponent loses; 0 if there is no such move."""
        return self.stones % (MOST + 1)


MATCHES = Matches[Nim]()


class NimPlayer(Environment):
    """Player of a match, or player 0 against a scripted opponent. The reward is 1 for a win, and `illegal` for every illegal move."""

    Settings = Settings
    isolated = False  # both players of a match change one game

    def __init__(self, row: Row, settings: Settings) -> None:
        super().__init__(row, settings)
        self._opponent: str = row.metadata.get("opponent", settings.opponent)
        self._random = random.Random(row.index)
        self._seat: Seat[Nim] | None = None
        self._game = Nim(int(row.label))
        self._num_chances = self._num_best = self._num_illegal = 0

    @property
    def _player(self) -> int:
        return 0 if self._seat is None else self._seat.player

    async def reset(self) -> Start:
        """Join the match; the second player waits for the first player's move."""
        if self._opponent == "self":
            self._seat = MATCHES.join(self.row.index, lambda: self._game)
            self._game = self._seat.game
            await self._seat.turn()
        return Start([self._heap()])

    async def step(self, turn: AssistantTurn) -> Step:
        """Make the policy's move and wait for the opponent's."""
        penalty = self._move(turn.content)
        if turn.last and self._game.winner is None:
            self._game.winner = 1 - self._player
        await self._let_opponent_move()
        if self._game.winner is None:
            return Step([self._heap()], reward=penalty)
        metrics = {"game/illegal": float(self._num_illegal)}
        if self._num_chances:
            metrics["game/best_moves"] = self._num_best / self._num_chances
        return Step(reward=penalty + float(self._game.winner == self._player), done=True, metrics=metrics)

    async def close(self) -> None:
        if self._seat is not None:
            await self._seat.leave()

    def _heap(self) -> dict[str, str]:
        return {"role": "user", "content": f"{self._game.stones} stones"}

    def _move(self, answer: str) -> float:
        """Take the number of stones that the answer names, or one stone if that is not a legal move; return the penalty."""
        legal = answer in {str(number) for number in range(1, min(MOST, self._game.stones) + 1)}
        number = int(answer) if legal else 1
        self._num_chances += self._game.best > 0
        self._num_best += legal and number == self._game.best
        self._num_illegal += not legal
        self._game.take(self._player, number)
        return 0.0 if legal else self.settings.illegal

    async def _let_opponent_move(self) -> None:
        game = self._game
        if self._seat is not None:
            await self._seat.moved(is_over=game.winner is not None)
            await self._seat.turn()
        elif game.winner is None:
            guess = self._random.randint(1, min(MOST, game.stones))
            game.take(1, (game.best or guess) if self._opponent == "perfect" else guess)
