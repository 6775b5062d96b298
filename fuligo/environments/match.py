"""Matches: two episodes that meet and take turns in one game, so that both sides are trained."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

Game = TypeVar("Game")


@dataclass(eq=False)
class _Match(Generic[Game]):
    """Game of two players, 0 and 1."""

    pair: int
    game: Game
    to_move: int = 0
    is_over: bool = False
    left: set[int] = field(default_factory=set)
    """Players whose episodes have ended."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


@dataclass(slots=True, frozen=True)
class Seat(Generic[Game]):
    """Place of one episode in a match."""

    player: int
    """Number of the player; player 0 moves first."""
    _match: _Match[Game]
    _open: dict[int, _Match[Game]]

    @property
    def game(self) -> Game:
        """Game state that both players change, each in turn."""
        return self._match.game

    @property
    def is_over(self) -> bool:
        return self._match.is_over

    async def turn(self) -> None:
        """Wait until the player is to move, or the game is over. Raises RuntimeError if the other episode ended before the game."""
        match, other = self._match, 1 - self.player
        async with match.changed:
            await match.changed.wait_for(lambda: match.is_over or match.to_move == self.player or other in match.left)
        if not match.is_over and other in match.left:
            raise RuntimeError("cannot continue the game: the other player's episode ended before the game; its sample says why")

    async def moved(self, *, is_over: bool) -> None:
        """Hand the turn to the other player after a move, or end the game."""
        match = self._match
        async with match.changed:
            match.to_move, match.is_over = 1 - self.player, is_over
            match.changed.notify_all()

    async def leave(self) -> None:
        """Leave the match for good, and notify the other player."""
        match = self._match
        if self._open.get(match.pair) is match:
            del self._open[match.pair]
        async with match.changed:
            match.left.add(self.player)
            match.changed.notify_all()


@dataclass(eq=False)
class Matches(Generic[Game]):
    """Pairing of the samples of a run: sample 2k plays sample 2k + 1, of the same prompt if `--n-samples-per-prompt` is even.

    An interruption interrupts both samples of a match; if they start over, they meet in a new one.
    """

    in_process_of_one: ClassVar[bool] = False
    """True in the separate process of an episode, where no other episode can join."""
    _open: dict[int, _Match[Game]] = field(default_factory=dict, init=False)
    """Matches in which one player waits for the other, by number of the pair."""

    def join(self, index: int, make: Callable[[], Game]) -> Seat[Game]:
        """Return the seat of sample `index`, in the match that its partner opened or in a new one with the game that `make` creates.

        Raises RuntimeError if the episode runs in a separate process.
        """
        if self.in_process_of_one:
            raise RuntimeError("cannot join a match from a separate process; set `isolated = False` in the environment's class")
        pair = index // 2
        match = self._open.pop(pair, None)
        if match is None:
            self._open[pair] = match = _Match(pair, make())
        return Seat(index % 2, match, self._open)
