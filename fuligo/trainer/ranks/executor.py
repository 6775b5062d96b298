"""The side of a rank that computes: runs the driver's commands, in whichever process the rank lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from fuligo.trainer.ranks.commands import Answer, Command, R
from fuligo.trainer.ranks.compute_thread import ComputeThread

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from fuligo.trainer.packing import Cost
    from fuligo.trainer.ranks.settings import TrainerSettings
    from fuligo.trainer.ranks.worker import RankWorker
    from fuligo.trainer.ranks.world import Rendezvous


class RankExecutor:
    """Runs commands one after another in a thread, so that the process answers pings meanwhile.

    Args:
        host: address at which rank 0's rendezvous store listens
        rendezvous: of a store that is already open (torchrun's); None: rank 0 opens one
        store: that store, where this process serves it
    """

    def __init__(
        self, rank: int, size: int, *, host: str = "127.0.0.1", rendezvous: Rendezvous | None = None, store: TCPStore | None = None
    ) -> None:
        self.rank = rank
        self.saving: Future[None] | None = None
        """Of the last `BeginSave`."""
        self.has_left = False
        self._size = size
        self._host = host
        self._rendezvous = rendezvous
        self._store = store
        self._worker: RankWorker | None = None
        self._compute = ComputeThread(f"trainer-rank-{rank}")

    @property
    def worker(self) -> RankWorker:
        assert self._worker is not None, "Load first"
        return self._worker

    def answer(self, command: Callable[[], Command[R]], *, is_queued: bool) -> Future[Answer[R]]:
        """Run a command.

        Args:
            command: returns it; called in the thread that runs it, since unpickling may import torch and take seconds.
            is_queued: as `Command.is_queued`.
        """
        if is_queued:
            return self._compute.submit(lambda: self._run(command))
        answered: Future[Answer[R]] = Future()
        answered.set_running_or_notify_cancel()
        threading.Thread(target=lambda: answered.set_result(self._run(command)), daemon=True).start()
        return answered

    def stop(self) -> None:
        """End the compute thread after the commands that are queued, and close the rendezvous store."""
        self._compute.stop()
        self._store = None

    def open_rendezvous(self) -> Rendezvous:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        from fuligo.trainer.ranks.world import Rendezvous

        if self._rendezvous is None:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            self._rendezvous = Rendezvous(self._host, self._store.port)
        return self._rendezvous

    def load(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> Cost | None:
        from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

        from fuligo.trainer.ranks import worker, world

        joined = world.World()
        if settings.needs_process_group:
            store = HashStore() if rendezvous is None else rendezvous.connect()
            joined = world.join_trainer(settings, self.rank, self._size, store)
        self._worker = worker.build_worker(settings, joined)
        return self._worker.balance_by

    def leave(self) -> None:
        """Leave the process group; the process may form another one, for the next trainer."""
        import torch.distributed as dist

        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self.has_left = True

    def _run(self, command: Callable[[], Command[R]]) -> Answer[R]:
        try:
            return Answer(command().run(self))
        except BaseException as error:
            return Answer(error=error)
