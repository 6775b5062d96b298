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

from fuligo.engines.client import EngineClient
from fuligo.errors import EngineError, WeightSyncError
from fuligo.weights.buckets import Bucket, as_bytes
from fuligo.weights.manifest import EngineAddress

TIMEOUT = timedelta(seconds=300)
"""Of a group's beginning and of one broadcast: an engine that is gone is noticed by then."""
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
            WeightSyncError: an engine did not join; names it
        """
        self.engines = tuple(engines)
        self.name = f"fuligo-weights-{next(_numbers)}"
        self._clients = [EngineClient(engine.url, retries=0, number=engine.number) for engine in engines]
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        sizes = [engine.num_ranks for engine in engines]
        world_size = 1 + sum(sizes)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        offsets = [1, *(1 + end for end in accumulate(sizes))]

        async def engines_join() -> None:
            await asyncio.gather(
                *(
                    client.init_weights_update_group(
                        host=host, port=store.port, rank_offset=offset, world_size=world_size, group_name=self.name, backend=backend
                    )
                    for client, offset in zip(self._clients, offsets)
                )
            )

        def join() -> dist.ProcessGroup:
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
            return group

        self._group = self._together(join, engines_join, f"join the {backend} group")
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

    def broadcast(self, bucket: Bucket, version: int | None) -> None:
        """Send one bucket to all engines; returns when they have loaded it.

        Args:
            version: given with the last bucket

        Raises:
            WeightSyncError: an engine refused it, or is gone
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

        self._together(lambda: self._broadcast(row), engines_receive, f"take a bucket of {row.numel()} bytes")

    def _broadcast(self, row: torch.Tensor) -> None:
        dist.broadcast(row, src=0, group=self._group)
        if row.is_cuda:
            torch.cuda.synchronize(row.device)

    def _together(self, own_part: Callable[[], T], engines_part: Callable[[], Coroutine[Any, Any, None]], what: str) -> T:
        """Do both at the same time: each waits for the other.

        Our part is in a daemon thread, for where an engine fails it may wait for good, out of reach of any deadline.
        """
        mine: Future[T] = Future()

        def work() -> None:
            try:
                mine.set_result(own_part())
            except BaseException as error:  # handed to whoever waits
                mine.set_exception(error)

        threading.Thread(target=work, name="weights-broadcast", daemon=True).start()
        try:
            asyncio.run(self._and_close(engines_part()))
            return mine.result(TIMEOUT.total_seconds())
        except (EngineError, RuntimeError, TimeoutError) as error:
            urls = ", ".join(engine.url for engine in self.engines)
            cause = str(error) or f"no end within {TIMEOUT.total_seconds():g} s"
            raise WeightSyncError(f"the engines {urls} did not {what}: {cause}. Resume from the last checkpoint.") from error

    def close(self) -> None:
        """Leave the group; engines that are gone or refuse are passed over, for theirs ends with them."""

        async def engines_leave() -> None:
            await asyncio.gather(*(client.destroy_weights_update_group(self.name) for client in self._clients), return_exceptions=True)

        asyncio.run(self._and_close(engines_leave()))
        dist.destroy_process_group(self._group)

    async def _and_close(self, call: Coroutine[Any, Any, None]) -> None:
        """A client's connections belong to the event loop that they were opened in."""
        try:
            await call
        finally:
            await asyncio.gather(*(client.close() for client in self._clients))
