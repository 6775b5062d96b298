"""Commands that the driver sends to trainer ranks, and the ranks' answers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast

from fuligo.errors import FuligoError, TrainerError

if TYPE_CHECKING:
    from fuligo.trainer.packing import Cost
    from fuligo.trainer.ranks.rank import Rank
    from fuligo.trainer.ranks.settings import TrainerSettings
    from fuligo.trainer.ranks.worker import RankWorker
    from fuligo.trainer.ranks.world import Rendezvous

logger = logging.getLogger(__name__)

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
E = TypeVar("E")
P = ParamSpec("P")


class Command(ABC, Generic[R_co]):
    """Command to a rank; can be pickled. `R_co` is the type of rank 0's result; other ranks' results are dropped."""

    name: str
    """As errors and logs name it."""
    is_queued: ClassVar[bool] = True
    """Runs in the rank's compute thread after the commands before it; else at once, in its own thread."""

    @abstractmethod
    def run(self, rank: Rank) -> R_co | None:
        """Execute the command in the rank's process."""


@dataclass(slots=True, frozen=True)
class Ping(Command[None]):
    """Heartbeat, which a rank answers as long as its interpreter runs."""

    name = "ping"
    is_queued = False

    def run(self, rank: Rank) -> None:
        pass


@dataclass(slots=True, frozen=True)
class OpenRendezvous(Command["Rendezvous"]):
    """Command to rank 0: open the store through which the ranks form their process group."""

    name = "start"

    def run(self, rank: Rank) -> Rendezvous:
        return rank.open_rendezvous()


@dataclass(slots=True, frozen=True)
class ImportWorker(Command[None]):
    """Command to a standby rank: import all that `Load` needs, without touching a device."""

    name = "import"
    settings: TrainerSettings

    def run(self, rank: Rank) -> None:
        rank.import_worker(self.settings)


@dataclass(slots=True, frozen=True)
class Load(Command["Cost | None"]):
    """Command to join the other ranks and build the worker; the result is its `balance_by`."""

    name = "load"
    settings: TrainerSettings
    rendezvous: Rendezvous | None
    """Store at which the ranks meet; None: the rank is alone."""

    def run(self, rank: Rank) -> Cost | None:
        return rank.load(self.settings, self.rendezvous)


@dataclass(slots=True, frozen=True)
class WorkerCall(Command[R_co]):
    """Call of a method of the rank's worker; `call` builds it."""

    name: str
    arguments: tuple[Any, ...]

    def run(self, rank: Rank) -> R_co | None:
        return getattr(rank.worker, self.name)(*self.arguments)


def call(method: Callable[Concatenate[RankWorker, P], R | None], *arguments: P.args, **_: P.kwargs) -> Command[R]:
    """Return the command to call a method of `RankWorker`: `call(RankWorker.score, share)`."""
    return WorkerCall(method.__name__, arguments)


@dataclass(slots=True, frozen=True)
class BeginSave(Command[None]):
    """Call of `RankWorker.begin_save`; the rank keeps its future for `EndSave`."""

    name = "begin_save"
    directory: Path

    def run(self, rank: Rank) -> None:
        rank.saving = rank.worker.begin_save(self.directory)


@dataclass(slots=True, frozen=True)
class EndSave(Command[None]):
    """Command to wait until the save that `BeginSave` began is on disk. Queued commands run meanwhile."""

    name = "end_save"
    is_queued = False

    def run(self, rank: Rank) -> None:
        assert rank.saving is not None, "BeginSave first"
        rank.saving.result()


@dataclass(slots=True, frozen=True)
class Leave(Command[None]):
    """Last command: leave the process group."""

    name = "close"

    def run(self, rank: Rank) -> None:
        rank.leave()


@dataclass(slots=True, frozen=True)
class Answer(Generic[R]):
    """Outcome of a command on one rank. Errors are values: a call that raises has lost its rank."""

    value: R | None = None
    error: BaseException | None = None

    def for_driver(self, rank: int) -> Answer[R]:
        """Return the answer as it leaves the rank's process: values from rank 0 only, unexpected errors as their text."""
        if self.error is None:
            return self if rank == 0 else Answer()
        if isinstance(self.error, FuligoError):
            return self
        logger.error("trainer rank %d failed", rank, exc_info=self.error)
        return Answer(error=UnexpectedError(f"{type(self.error).__name__}: {self.error}"))


class UnexpectedError(TrainerError):
    """Error of a rank in another process that was not raised for the user to read; its traceback is in the rank's output."""


class SharedCommand(Generic[R]):
    """Command on its way to several ranks; each transport encodes it once, for all its ranks."""

    def __init__(self, command: Command[R]) -> None:
        self.command = command
        self._lock = Lock()
        self._encoded: dict[Callable[[Any], Any], Any] = {}

    def encoded(self, encode: Callable[[Command[R]], E]) -> E:
        """Return `encode(command)`, from the first call with this function."""
        with self._lock:
            if encode not in self._encoded:
                self._encoded[encode] = encode(self.command)
            return cast(E, self._encoded[encode])
