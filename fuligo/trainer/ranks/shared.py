"""Trainer that several runs share: each is rank 0 of its own trainer, in one process, one compute thread and over one copy of the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fuligo.errors import TrainerError
from fuligo.limits import collector_paused
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.rank import Rank, RankExecutor
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from fuligo.models.shared_base import SharedBase
    from fuligo.trainer.packing import Cost
    from fuligo.trainer.ranks.settings import TrainerSettings
    from fuligo.trainer.ranks.world import Rendezvous, World


class SharedTrainer:
    """Process's trainer of several runs. Their commands run one at a time, in the order in which they arrive.

    Args:
        max_threads: CPU threads of the computation; None: those of a trainer alone
    """

    def __init__(self, max_threads: int | None = None) -> None:
        self._max_threads = max_threads
        self._compute = ComputeThread("shared-trainer")
        self._world: World | None = None
        self._base: SharedBase | None = None

    def executor(self) -> RankExecutor:
        """Return the executor of one more run's rank."""
        return RankExecutor(SharedRank(self), RunThread(self._compute))

    def world(self, join: Callable[[], World]) -> World:
        """Return the process's place, which the first run joins for all."""
        if self._world is None:
            import torch

            self._world = join()
            if self._max_threads is not None:
                torch.set_num_threads(min(torch.get_num_threads(), self._max_threads))
        return self._world

    def base(self) -> SharedBase:
        if self._base is None:
            from fuligo.models.shared_base import SharedBase

            self._base = SharedBase()
        return self._base

    def release(self, executor: RankExecutor) -> None:
        """Free the adapter and optimizer of a run that has ended, also one that was killed."""
        self._compute.submit(executor.rank.leave)

    def stop(self) -> None:
        self._compute.stop()


class SharedRank(Rank):
    """Rank of one run in a `SharedTrainer`."""

    def __init__(self, trainer: SharedTrainer) -> None:
        super().__init__(0, 1)
        self._trainer = trainer

    def load(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> Cost | None:
        if not isinstance(settings, TorchTrainerSettings) or settings.lora is None:
            raise TrainerError("cannot share a trainer: only runs that train a LoRA adapter with the torch trainer can; train it alone")
        joined = self._trainer.world(lambda: self.join(settings, rendezvous))
        with collector_paused():
            from fuligo.trainer.torch_backend.worker import TorchRankWorker

        self._worker = TorchRankWorker(settings, joined, base=self._trainer.base())
        return self._worker.balance_by

    def leave(self) -> None:
        """Drop the run's worker; the process group is that of all runs."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self.has_left = True


class RunThread:
    """Share of one run in a compute thread: its functions find the global random state as they left it."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread
        self._state: Mapping[str, Tensor] | None = None
        """State after the last function; None before the first."""

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(lambda: self._run(function))

    def stop(self) -> None:
        """Do nothing: the thread is the other runs', too."""

    def _run(self, function: Callable[[], Any]) -> Any:
        with self._own_random_state():
            return function()

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        import torch

        if self._state is not None:
            torch.set_rng_state(self._state["torch"])
            if "cuda" in self._state:
                torch.cuda.set_rng_state(self._state["cuda"])
        try:
            yield
        finally:
            self._state = {"torch": torch.get_rng_state()}
            if torch.cuda.is_initialized():
                self._state["cuda"] = torch.cuda.get_rng_state()
