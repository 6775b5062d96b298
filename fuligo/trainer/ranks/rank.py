"""Trainer rank on the side that computes: the object whose methods commands call, and the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from fuligo.engines.host import is_loopback, listening_store, use_loopback_interface
from fuligo.errors import TrainerError
from fuligo.limits import collector_paused
from fuligo.trainer.ranks.commands import Answer, Command, R
from fuligo.trainer.ranks.compute_thread import ComputeThread

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from fuligo.trainer.packing import Cost
    from fuligo.trainer.ranks.settings import TrainerSettings
    from fuligo.trainer.ranks.shared import RunShare
    from fuligo.trainer.ranks.worker import RankWorker
    from fuligo.trainer.ranks.world import Rendezvous, World


class Rank:
    """Trainer rank, which has a worker after `load`. torch is imported only by `start`, `import_worker` and `load`.

    Args:
        host: address at which rank 0's rendezvous store listens.
        rendezvous: rendezvous whose store is already open (torchrun's); None: rank 0 opens one.
        store: store of the rendezvous, if this process serves it.
    """

    def __init__(
        self, number: int, size: int, *, host: str = "127.0.0.1", rendezvous: Rendezvous | None = None, store: TCPStore | None = None
    ) -> None:
        self.number = number
        self.saving: Future[None] | None = None
        """Future of the last `begin_save`."""
        self.has_left = False
        self._size = size
        self._host = host
        self._rendezvous = rendezvous
        self._store = store
        self._worker: RankWorker | None = None

    @property
    def worker(self) -> RankWorker:
        assert self._worker is not None, "call load first"
        return self._worker

    def ping(self) -> None:
        """Do nothing: the answer shows that the interpreter runs."""

    def start(self) -> Rendezvous:
        """Open the store through which the ranks form their process group, and return its address. Called on rank 0 only."""
        from fuligo.trainer.ranks.world import Rendezvous

        if self._rendezvous is None:
            self._store = listening_store(self._host)
            self._rendezvous = Rendezvous(self._host, self._store.port)
        return self._rendezvous

    def import_worker(self, settings: TrainerSettings) -> None:
        """Import the worker's modules, with the environment variables that `load` would set.

        Raises TrainerError if an import initialized CUDA, which would take GPU memory from the rank that trains.
        """
        with collector_paused():
            import torch

            from fuligo.trainer.ranks import worker, world

            world.set_environment(settings)
            worker.import_worker(settings)
        if torch.cuda.is_initialized():
            raise TrainerError(
                "cannot start a standby rank: an imported module, such as a hook's, initialized CUDA, which takes GPU memory; make it "
                "initialize CUDA lazily"
            )

    def load(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> Cost | None:
        """Form the process group through `rendezvous` (None: the only rank) and build the worker; return the worker's `balance_by`."""
        joined = self.join(settings, rendezvous)
        from fuligo.trainer.ranks import worker

        self._worker = worker.build_worker(settings, joined)
        return self._worker.balance_by

    def join(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> World:
        """Form the process group with the other ranks, if the settings need one, and return this rank's `World`."""
        with collector_paused():
            from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

            from fuligo.trainer.ranks import world

        joined = world.World()
        if rendezvous is None or is_loopback(rendezvous.host):
            use_loopback_interface()
        if settings.needs_process_group:
            store, key = (HashStore(), None) if rendezvous is None else (rendezvous.connect(), rendezvous.key)
            world.set_environment(settings)
            timeout_s = settings.command_timeout_s
            joined = world.join_world(self.number, self._size, settings.device, store=store, key=key, timeout_s=timeout_s)
        else:
            world.share_cores(1)
        return joined

    def begin_save(self, directory: Path) -> None:
        """Begin the worker's save and keep its future for `end_save`."""
        self.saving = self.worker.begin_save(directory)

    def end_save(self) -> None:
        """Wait until the save that `begin_save` began is on disk. Raises CheckpointError if it could not be written."""
        assert self.saving is not None, "call begin_save first"
        self.saving.result()

    def leave(self) -> None:
        """Leave the process group. The process may form another one for the next trainer."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._leave_world()
        self.has_left = True

    def _leave_world(self) -> None:
        from fuligo.trainer.ranks import world

        world.leave_world()

    def close_store(self) -> None:
        """Close the rendezvous store if this process serves it."""
        self._store = None


class RankExecutor:
    """Executor of a rank's commands: queued ones run one after another in a compute thread, others, such as pings, at once.

    Args:
        compute: thread of the queued commands; None: a new one.
    """

    def __init__(self, rank: Rank, compute: ComputeThread | RunShare | None = None) -> None:
        self.rank = rank
        self._compute = ComputeThread(f"trainer-rank-{rank.number}") if compute is None else compute

    def answer(self, command: Callable[[], Command[R]], *, is_queued: bool) -> Future[Answer[R]]:
        """Run a command and return the future of its answer.

        Args:
            command: function that returns the command; called in the thread that runs it, because unpickling may import torch and take
                seconds.
            is_queued: as `Command.is_queued`.
        """
        if is_queued:
            return self._compute.submit(lambda: self._run(command))
        answered: Future[Answer[R]] = Future()
        answered.set_running_or_notify_cancel()
        threading.Thread(target=lambda: answered.set_result(self._run(command)), daemon=True).start()
        return answered

    def stop(self) -> None:
        """Stop the compute thread after the queued commands, and close the rendezvous store."""
        self._compute.stop()
        self.rank.close_store()

    def _run(self, command: Callable[[], Command[R]]) -> Answer[R]:
        try:
            return Answer(command().run(self.rank))
        except BaseException as error:
            return Answer(error=error)
