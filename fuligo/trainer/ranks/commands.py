"""Commands that the driver sends to trainer ranks, and the ranks' answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from fuligo.errors import FuligoError, TrainerError

if TYPE_CHECKING:
    from fuligo.trainer.ranks.rank import Rank
    from fuligo.trainer.ranks.worker import RankWorker

logger = logging.getLogger(__name__)

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(slots=True, frozen=True)
class Command(Generic[R_co]):
    """Picklable method call for ranks to execute. `R_co` is the type of rank 0's result; results of other ranks are discarded."""

    name: str
    """Name of the method, also used in errors and logs."""
    arguments: tuple[Any, ...] = ()
    of_worker: bool = True
    """True: method of the rank's worker; False: method of the `Rank` itself."""
    is_queued: bool = True
    """True: run in the rank's compute thread after earlier commands; False: run at once in a separate thread."""

    def run(self, rank: Rank) -> R_co | None:
        """Execute the command in the rank's process and return its result."""
        return getattr(rank.worker if self.of_worker else rank, self.name)(*self.arguments)


def call(method: Callable[Concatenate[RankWorker, P], R | None], *arguments: P.args, **_: P.kwargs) -> Command[R]:
    """Return the command that calls a method of `RankWorker` with positional arguments: `call(RankWorker.score, share)`."""
    return Command(method.__name__, arguments)


def call_rank(method: Callable[Concatenate[Rank, P], R], *arguments: P.args, **_: P.kwargs) -> Command[R]:
    """Return the command that calls a method of `Rank` with positional arguments: `call_rank(Rank.load, settings, rendezvous)`."""
    return Command(method.__name__, arguments, of_worker=False)


@dataclass(slots=True, frozen=True)
class Answer(Generic[R]):
    """Outcome of a command on one rank. A command's error is returned in `error`; only the loss of the rank is raised."""

    value: R | None = None
    """Result of the command; None if it failed, and in answers to the driver from ranks other than 0."""
    error: BaseException | None = None

    def for_driver(self, rank: int) -> Answer[R]:
        """Return the answer to send to the driver's process: the value from rank 0 only, an unexpected error as its text."""
        if self.error is None:
            return self if rank == 0 else Answer()
        if isinstance(self.error, FuligoError):
            return self
        logger.error("trainer rank %d failed", rank, exc_info=self.error)
        return Answer(error=UnexpectedError(f"{type(self.error).__name__}: {self.error}"))


class UnexpectedError(TrainerError):
    """Raised in place of a rank's error that is not a `FuligoError`; the traceback is in the output of the rank's process."""


class SharedCommand(Generic[R]):
    """Command for several ranks; each transport encodes it once and sends the same bytes to all its ranks."""

    def __init__(self, command: Command[R]) -> None:
        self.command = command
        self._lock = Lock()
        self._encoded: dict[Callable[[Any], Any], Any] = {}

    def encoded(self, encode: Callable[[Command[R]], E]) -> E:
        """Return `encode(command)`, computed once per `encode` function."""
        with self._lock:
            if encode not in self._encoded:
                self._encoded[encode] = encode(self.command)
            return cast(E, self._encoded[encode])
