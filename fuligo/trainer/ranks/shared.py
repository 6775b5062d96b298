"""Trainer that several runs share: each run has one rank, and all ranks use the same process, compute thread and base weights."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fuligo.errors import TrainerError
from fuligo.limits import collector_paused
from fuligo.trainer.ranks.commands import Answer, Command, R
from fuligo.trainer.ranks.compute_thread import Work, start_thread
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from fuligo.models.adapter import SharedBase
    from fuligo.trainer.packing import Cost
    from fuligo.trainer.ranks.settings import TrainerSettings
    from fuligo.trainer.ranks.world import Rendezvous, World


PHASES = ("score", "train")
"""Commands that are followed immediately by the next command of the step: `score` by `train`, and `train` by `send_weights`."""
KEEP_TURN_S = 1.0
"""Seconds that the trainer waits for the next phase of a step while other runs wait; a driver takes less between two phases."""


class SharedTrainer:
    """Trainer of several runs in this process, whose commands run one at a time.

    Args:
        max_threads: maximum number of CPU threads for computation; None: as many as an unshared trainer uses.
    """

    def __init__(self, max_threads: int | None = None) -> None:
        self.num_runs = 0
        """Number of runs that have received an executor, including those that have ended."""
        self._max_threads = max_threads
        self._compute = TurnThread()
        self._world: World | None = None
        self._base: SharedBase | None = None

    def executor(self) -> RankExecutor:
        """Return an executor for the rank of another run."""
        self.num_runs += 1
        return SharedExecutor(SharedRank(self), RunShare(self._compute))

    def world(self, join: Callable[[], World]) -> World:
        """Return the process's `World`; the first call joins the process group with `join`, for all runs."""
        if self._world is None:
            import torch

            self._world = join()
            if self._max_threads is not None:
                torch.set_num_threads(min(torch.get_num_threads(), self._max_threads))
        return self._world

    def base(self) -> SharedBase:
        if self._base is None:
            from fuligo.models.adapter import SharedBase

            self._base = SharedBase()
        return self._base

    def release(self, executor: RankExecutor) -> None:
        """Free the adapter and optimizer of a run that has ended or was killed."""
        self._compute.submit(RunShare(self._compute), executor.rank.leave)

    def stop(self) -> None:
        self._compute.stop()


class SharedRank(Rank):
    """Rank of one run in a `SharedTrainer`."""

    def __init__(self, trainer: SharedTrainer) -> None:
        super().__init__(0, 1)
        self._trainer = trainer

    def load(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> Cost | None:
        if not isinstance(settings, TorchTrainerSettings) or settings.lora is None:
            raise TrainerError(
                "cannot share a trainer: the run does not train a LoRA adapter with --train-backend torch; set --lora-rank and that "
                "backend, or start the run separately"
            )
        joined = self._trainer.world(lambda: self.join(settings, rendezvous))
        with collector_paused():
            from fuligo.trainer.torch_backend.compiled_layers import allow_compiled_kinds
            from fuligo.trainer.torch_backend.worker import TorchRankWorker

        allow_compiled_kinds(self._trainer.num_runs)
        self._worker = TorchRankWorker(settings, joined, base=self._trainer.base())
        return self._worker.balance_by

    def _leave_world(self) -> None:
        """Stay in the process group, which all runs share."""


class SharedExecutor(RankExecutor):
    """Executor of one run's rank, which records whether the run is within a step."""

    def __init__(self, rank: Rank, share: RunShare) -> None:
        super().__init__(rank, share)
        self._share = share

    def _run(self, command: Callable[[], Command[R]]) -> Answer[R]:
        def noted() -> Command[R]:
            work = command()
            if work.is_queued:
                self._share.is_in_step = work.name in PHASES
            return work

        return super()._run(noted)


class TurnThread:
    """Thread that computes for several runs in the order of their requests, except that a run keeps its turn between the phases of a step.

    Otherwise the weight sync of one run would wait for the training of another, and both would then sample at the same time while the
    trainer is idle.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._waiting: deque[tuple[RunShare, Work]] = deque()
        self._keeper: RunShare | None = None
        """Run that has just computed and is about to submit its next phase; None: the first in the queue is next."""
        self._keeps_until_s = 0.0
        self._stopping = False
        start_thread("shared-trainer", self._next)

    def submit(self, share: RunShare, function: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return share.run(function)
            finally:
                self._keeper = share if share.is_in_step else None
                self._keeps_until_s = time.monotonic() + KEEP_TURN_S

        future: Future[Any] = Future()
        with self._wake:
            self._waiting.append((share, (run, future)))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Stop the thread when all submitted work is done."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _next(self) -> Work | None:
        with self._wake:
            while True:
                own = next((waiting for waiting in self._waiting if waiting[0] is self._keeper), None)
                left_s = self._keeps_until_s - time.monotonic()
                if own is None and self._waiting and (self._keeper is None or left_s <= 0 or self._stopping):
                    own = self._waiting[0]
                if own is not None:
                    self._waiting.remove(own)
                    return own[1]
                if self._stopping:
                    return None
                self._wake.wait(left_s if self._waiting else None)


class RunShare:
    """One run's share of the thread. Its functions run with the global random state that the run's previous function left."""

    def __init__(self, thread: TurnThread) -> None:
        self._thread = thread
        self._state: Mapping[str, Tensor] | None = None
        """Random state after the run's last function; None before the first."""
        self.is_in_step = False
        """True if the last command was a phase of a step that another phase follows."""

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(self, function)

    def stop(self) -> None:
        """Do nothing, because other runs also use the thread."""

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function with this run's random state. Called by the shared thread."""
        import torch

        if self._state is not None:
            torch.set_rng_state(self._state["torch"])
            if "cuda" in self._state:
                torch.cuda.set_rng_state(self._state["cuda"])
        try:
            return function()
        finally:
            self._state = {"torch": torch.get_rng_state()}
            if torch.cuda.is_initialized():
                self._state["cuda"] = torch.cuda.get_rng_state()
