"""Weights by broadcast: a process group of the sending rank (rank 0) and all ranks of the engines.

Built as SGLang builds its end (`init_custom_process_group` in its 0.5.15: a TCPStore, under a prefix with the group's name, and torch's own
helper), so that both ends meet under the same keys. A bucket travels as one row of bytes, its names, types and shapes by HTTP
(`/update_weights_from_distributed`, load_format `flattened_bucket`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import accumulate, count
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from fuligo.engines.connect import connect
from fuligo.engines.deadlines import BUCKET
from fuligo.engines.engine import InferenceEngine
from fuligo.errors import EngineError
from fuligo.formats.buckets import Bucket, as_bytes
from fuligo.formats.weight_manifest import EngineAddress

TIMEOUT = timedelta(seconds=BUCKET.seconds)
"""Of a group's beginning and of one broadcast, where no engine says that it failed."""
LEAVE_TIMEOUT_S = 15.0
"""For an engine to leave a group. NCCL waits for a dead peer for good: who is in it then does not leave, and has to be started again."""
_numbers = count()
T = TypeVar("T")


class BroadcastGroup:
    """The sender's end, open until `close`.

    Args:
        engines: their ranks follow each other in this order
        backend: gloo on a CPU, nccl between GPUs
        host: of this process, as the engines reach it
    """

    def __init__(self, engines: Sequence[EngineAddress], backend: Literal["gloo", "nccl"], host: str) -> None:
        """
        Raises:
            EngineError: an engine did not join; nobody waits for it any more
        """
        self.engines = tuple(engines)
        self.name = f"fuligo-weights-{next(_numbers)}"
        self._clients = [connect(engine.url, retries=0, number=engine.number) for engine in engines]
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        try:
            self._group = self._join(backend, host, self._store.port)
        except EngineError:
            self.close()
            raise

    def _join(self, backend: Literal["gloo", "nccl"], host: str, port: int) -> dist.ProcessGroup:
        sizes = [engine.num_ranks for engine in self.engines]
        world_size = 1 + sum(sizes)
        offsets = [1, *(1 + end for end in accumulate(sizes))]

        async def engines_join() -> None:
            await asyncio.gather(
                *(
                    client.init_weights_update_group(
                        host=host, port=port, rank_offset=offset, world_size=world_size, group_name=self.name, backend=backend
                    )
                    for client, offset in zip(self._clients, offsets)
                )
            )

        def join() -> dist.ProcessGroup:
            store = TCPStore(host, port, is_master=False, timeout=TIMEOUT)  # our own goes when we give up, and whoever waits in it hears so
            group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                dist.Backend(backend),
                PrefixStore(self.name, store),
                group_name=self.name,  # pyright: ignore[reportArgumentType]  # SGLang gives a plain text, too
                timeout=TIMEOUT,
            )
            assert isinstance(group, dist.ProcessGroup)
            _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
            return group

        return self._together(join, engines_join(), f"join the {backend} group")

    def broadcast(self, bucket: Bucket, version: int | None) -> None:
        """Send one bucket to all engines; returns when they have loaded it.

        Args:
            version: given with the last bucket

        Raises:
            EngineError: an engine refused it, or is gone; others may have loaded it, and some may still wait in the group until `close`
        """
        row = torch.cat([as_bytes(tensor) for _, tensor in bucket]).to(self._device)

        async def engines_receive() -> None:
            await asyncio.gather(
                *(
                    client.update_weights_from_distributed(
                        names=[name for name, _ in bucket],
                        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                        shapes=[list(tensor.shape) for _, tensor in bucket],
                        group_name=self.name,
                        version=version,
                    )
                    for client in self._clients
                )
            )

        self._together(lambda: self._broadcast(row), engines_receive(), f"take a bucket of {row.numel()} bytes")

    def _broadcast(self, row: torch.Tensor) -> None:
        dist.broadcast(row, src=0, group=self._group)
        if row.is_cuda:
            torch.cuda.synchronize(row.device)

    def _together(self, own_part: Callable[[], T], engines_part: Coroutine[Any, Any, None], what: str) -> T:
        """Do both at the same time: each waits for the other, and the first that fails ends the wait.

        Our part is in a daemon thread, for where an engine fails it may wait for good, out of reach of any deadline.
        """
        mine: Future[T] = Future()
        mine.set_running_or_notify_cancel()

        def work() -> None:
            try:
                mine.set_result(own_part())
            except BaseException as error:  # handed to whoever waits
                mine.set_exception(error)

        async def both() -> T:
            own, theirs = asyncio.wrap_future(mine), asyncio.create_task(engines_part)
            try:
                async with asyncio.timeout(TIMEOUT.total_seconds()):
                    await asyncio.gather(own, theirs)
                return own.result()
            finally:
                own.cancel()  # the thread's end is nobody's concern any more
                theirs.cancel()
                await asyncio.gather(theirs, return_exceptions=True)

        threading.Thread(target=work, name="weights-broadcast", daemon=True).start()
        try:
            return asyncio.run(self._and_close(both()))
        except (EngineError, RuntimeError, TimeoutError) as error:
            urls = ", ".join(engine.url for engine in self.engines)
            cause = str(error) or f"no end within {TIMEOUT.total_seconds():g} s"
            raise EngineError(f"the engines {urls} did not {what}: {cause}") from error

    def close(self) -> None:
        """Leave the group, whatever state it is in. Engines that wait for us in it hear that we are gone, where its backend tells them."""
        if self._group is not None:
            self._group.abort()  # unlike a shutdown it does not wait for peers, who may be gone
            dist.destroy_process_group(self._group)
            self._group = None

        async def leave(client: InferenceEngine) -> None:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await client.destroy_weights_update_group(self.name)

        async def engines_leave() -> None:
            self._store = None  # who still waits for others to join gets an error
            await asyncio.gather(*(leave(client) for client in self._clients), return_exceptions=True)

        asyncio.run(self._and_close(engines_leave()))

    async def _and_close(self, call: Coroutine[Any, Any, T]) -> T:
        """A client's connections belong to the event loop that they were opened in."""
        try:
            return await call
        finally:
            await asyncio.gather(*(client.close() for client in self._clients))
