"""Trainer rank on the side that computes: the object whose methods commands call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fuligo.engines.host import is_loopback, listening_store, use_loopback_interface
from fuligo.errors import TrainerError
from fuligo.limits import collector_paused

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import TCPStore

    from fuligo.trainer.packing import Cost
    from fuligo.trainer.ranks.settings import TrainerSettings
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

            from fuligo.trainer.ranks import world

            world.set_environment(settings)
            import_worker(settings)
        if torch.cuda.is_initialized():
            raise TrainerError(
                "cannot start a standby rank: an imported module, such as a hook's, initialized CUDA, which takes GPU memory; make it "
                "initialize CUDA lazily"
            )

    def load(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> Cost | None:
        """Form the process group through `rendezvous` (None: the only rank) and build the worker; return the worker's `balance_by`."""
        self._worker = build_worker(settings, self.join(settings, rendezvous))
        return self._worker.balance_by

    def join(self, settings: TrainerSettings, rendezvous: Rendezvous | None) -> World:
        """Form the process group with the other ranks, if the settings need one, and return this rank's `World`."""
        with collector_paused():
            from torch.distributed import HashStore

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


def build_worker(settings: TrainerSettings, world: World) -> RankWorker:
    """Build the worker of this rank with the backend of the settings. A collective.

    Raises:
        CheckpointError: weights cannot be read.
        TrainerError: the backend cannot run the model.
        ConfigError: the settings do not fit the model or the ranks, such as the lists of trained parameters or the parallel layout.
    """
    return import_worker(settings)(settings, world)


def import_worker(settings: TrainerSettings) -> Callable[[Any, World], RankWorker]:
    """Import the backend of the settings and return its worker class."""
    with collector_paused():
        from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings

        if isinstance(settings, MegatronTrainerSettings):
            from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

            return MegatronRankWorker
        from fuligo.trainer.torch_backend.worker import TorchRankWorker

        return TorchRankWorker
