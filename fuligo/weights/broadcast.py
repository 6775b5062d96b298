"""Weight sync by broadcast in a process group of the sending rank (rank 0) and all ranks of the engines.

The group is created like SGLang's (`init_custom_process_group` in 0.5.15: a TCPStore with the group's name as prefix, and torch's helper),
so that both sides use the same keys. A bucket is broadcast as one byte tensor. If all engines have the plugin `fuligo_sync`, one call per
engine receives all buckets, and names, data types and shapes are sent through the group's store; otherwise each bucket is a call
(`/update_weights_from_distributed`, load_format `flattened_bucket`).
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, count, pairwise
from traceback import clear_frames
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from fuligo.engines.connection import DEFAULT
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.host import listening_store, reachable_by_others
from fuligo.engines.shared_client import client_of
from fuligo.errors import EngineError
from fuligo.formats.buckets import Bucket, packed
from fuligo.formats.weight_manifest import EngineAddress
from fuligo.weights.stream import Stream, free_when_sent, wait_until_sent

logger = logging.getLogger(__name__)
TIMEOUT = timedelta(seconds=DEFAULT.bucket.seconds)
"""Timeout of joining a group and of one broadcast, if no engine reports a failure."""
LEAVE_TIMEOUT_S = 15.0
"""Seconds for an engine to leave a group. With NCCL, an engine that waits for a dead peer waits forever and must be restarted."""
ANSWER_POLL_S = 0.01
"""Longest time in seconds that the event loop runs to read answers of engines."""
ANNOUNCED_WITHIN = timedelta(seconds=10)
"""Longest wait until all ranks of the engines announce that they receive streams, after the first rank of each did."""
IDLE_S = 2.0
"""Idle seconds after which HTTP connections are reopened: engines close idle ones after 5 s, and a blocked event loop does not notice."""
_numbers = count()
T = TypeVar("T")


class BroadcastGroup:
    """Sender's side of a process group until `close`. `engines` are in the order of their ranks; they reach this process at `host`."""

    def __init__(self, engines: Sequence[EngineAddress], backend: Literal["gloo", "nccl"], host: str) -> None:
        """Join the group together with the engines. Raises EngineError if one did not join; the others have then left the group."""
        self.engines = tuple(engines)
        self.name = f"fuligo-weights-{next(_numbers)}"
        self._clients = [client_of(engine) for engine in engines]
        self._loop = asyncio.Runner()
        self._last_call_s = time.monotonic()
        self._loading: asyncio.Task[None] | None = None
        """Requests for the previous bucket, which engines load while the next one is prepared, or for the stream."""
        self._stream: Stream | None = None
        """Stream that engines are receiving."""
        self._num_streams = 0
        self._old_keys: list[str] = []
        """Keys of earlier streams that are still in the store."""
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = listening_store(host, timeout=TIMEOUT)
        self._names: PrefixStore | None = None
        """Part of the store with the names, data types and shapes of streamed tensors."""
        self.streams = False
        """True if engines receive all buckets of a sync in one call."""
        try:
            self._group = self._join(backend, host, self._store.port)
            self._names = PrefixStore(f"{self.name}/stream", self._store)
            self.streams = self._all_stream(self._names)
        except Exception:
            self.close()
            raise

    def _all_stream(self, store: PrefixStore) -> bool:
        """Return whether every rank of every engine receives streams."""
        ranks = self._ranks()
        if not all(store.check([f"rank/{of_engine[0]}"]) for of_engine in ranks):
            return False
        try:  # the other ranks of an engine may be a moment behind its first, which answered
            store.wait([f"rank/{rank}" for of_engine in ranks for rank in of_engine], ANNOUNCED_WITHIN)
        except dist.DistError:
            logger.warning("not all ranks of the engines have fuligo's plugin for SGLang; each bucket of weights needs its own request")
            return False
        return True

    def _ranks(self) -> list[range]:
        """Return the ranks of each engine in the group."""
        ends = [*accumulate((engine.num_ranks for engine in self.engines), initial=1)]
        return [range(start, end) for start, end in pairwise(ends)]

    def _join(self, backend: Literal["gloo", "nccl"], host: str, port: int) -> dist.ProcessGroup:
        sizes = [engine.num_ranks for engine in self.engines]
        world_size = 1 + sum(sizes)
        offsets = [1, *(1 + end for end in accumulate(sizes))]

        async def engine_joins(client: InferenceEngine, offset: int) -> None:
            with suppress(EngineError, TimeoutError):
                await self._leave(client)  # leaves a group of the same name whose sender was lost (--max-restarts)
            await client.init_weights_update_group(
                host=host, port=port, rank_offset=offset, world_size=world_size, group_name=self.name, backend=backend
            )

        async def engines_join() -> None:
            await asyncio.gather(*(engine_joins(client, offset) for client, offset in zip(self._clients, offsets)))

        def join() -> dist.ProcessGroup:
            # On failure the master store is closed, which wakes all waiting clients.
            store = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
            with reachable_by_others(host):
                group, _ = _new_process_group_helper(
                    world_size,
                    0,
                    [],
                    dist.Backend(backend),
                    PrefixStore(self.name, store),
                    group_name=self.name,  # pyrefly: ignore[bad-argument-type]  # SGLang also passes a plain string
                    timeout=TIMEOUT,
                )
            assert isinstance(group, dist.ProcessGroup)
            _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
            return group

        return self._together(join, engines_join(), f"join the {backend} group")

    def broadcast(self, bucket: Bucket, version: int, *, is_last: bool) -> None:
        """Send one bucket to all engines.

        Return when it is sent (in a stream: when the previous one is sent); after the last bucket, when the engines have loaded all.

        Engines report `version` once they have loaded the last bucket. Raises EngineError if an engine refused this or the previous bucket,
        or died. Other engines may have loaded the bucket, and some may wait in the group until `close`.
        """
        what = f"load a bucket of {sum(tensor.nbytes for _, tensor in bucket)} bytes"
        if self._stream is not None and not is_last:
            self._continue(bucket, f"{what} or a previous one")
        elif self.streams:
            engines_part = None
            if self._stream is None:
                self._stream, self._num_streams = Stream(self._num_streams), self._num_streams + 1
                engines_part = self._receive_stream(self._stream, version)
            else:
                what += " or a previous one"
            self._together(lambda: self._extend(bucket, is_last=is_last), engines_part, what, waits_for_engines=is_last)
        else:
            receive = self._receive_bucket(bucket, version if is_last else None)
            what += " or the previous one" if self._loading else ""
            self._together(lambda: self._send(bucket), receive, what, waits_for_engines=is_last)
        if is_last:
            if self._stream is not None:
                self._require_loaded(self._stream)
                self._old_keys += map(self._stream.key, range(self._stream.num_buckets + 1))
                self._stream = None
            self._loop.run(self._close_connections())

    @property
    def is_streaming(self) -> bool:
        """True while engines wait for further buckets of a stream."""
        return self._stream is not None

    async def _receive_bucket(self, bucket: Bucket, version: int | None) -> None:
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        await asyncio.gather(
            *(
                client.update_weights_from_distributed(names=names, dtypes=dtypes, shapes=shapes, group_name=self.name, version=version)
                for client in self._clients
            )
        )

    async def _receive_stream(self, stream: Stream, version: int) -> None:
        await asyncio.gather(
            *(client.receive_weight_stream(stream=stream.number, group_name=self.name, version=version) for client in self._clients)
        )

    def _send(self, bucket: Bucket) -> None:
        row = packed(bucket).to(self._device)
        dist.broadcast(row, src=0, group=self._group)
        if row.is_cuda:
            torch.cuda.synchronize(row.device)

    def _continue(self, bucket: Bucket, what: str) -> None:
        """Extend the stream in this thread, which takes less time than `_together`: the link needs 1.5 ms per bucket of 512 MiB."""
        try:
            self._extend(bucket, is_last=False, call_failure=self._call_failure)
        except (EngineError, RuntimeError) as error:
            clear_frames(error.__traceback__)  # as in `_together`
            raise self._failed(what, str(error)) from error

    def _call_failure(self) -> str:
        """Return why the engines' call for the stream has failed; empty if it has not, so far as its answers have arrived."""
        assert self._loading is not None
        self._loop.run(asyncio.wait([self._loading], timeout=ANSWER_POLL_S))
        return str(self._loading.exception() or "") if self._loading.done() else ""

    def _extend(self, bucket: Bucket, *, is_last: bool, call_failure: Callable[[], str] = str) -> None:
        """Start the broadcast of the stream's next bucket, and wait for the previous broadcast; after the last bucket, wait for both.

        `call_failure` returns why the engines' call has failed, or an empty text; by default another thread watches the call.
        """
        stream, names = self._stream, self._names
        assert stream is not None and names is not None
        tensors = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes) for name, tensor in bucket]
        names.set(stream.key(stream.num_buckets), json.dumps(tensors))
        row = packed(bucket).to(self._device)
        previous, stream.in_flight = stream.in_flight, dist.broadcast(row, src=0, group=self._group, async_op=True)
        stream.num_buckets += 1
        if is_last:
            names.set(stream.key(stream.num_buckets), json.dumps(None))
        for _ in range(min(2, len(self._old_keys))):
            names.delete_key(self._old_keys.pop())
        del names  # engines that wait for a bucket get an error only when the store is freed
        for work in (previous, stream.in_flight) if is_last else (previous,):
            if work is not None:
                wait_until_sent(work, TIMEOUT.total_seconds(), lambda: call_failure() or self._failure(stream))

    def _require_loaded(self, stream: Stream) -> None:
        """Check that all ranks have loaded a stream; the answer of an engine is that of its first rank. Raises EngineError."""
        assert self._names is not None
        keys = [stream.outcome_key(rank) for of_engine in self._ranks() for rank in of_engine]
        try:
            self._names.wait(keys, TIMEOUT)
        except dist.DistError as error:
            raise EngineError(f"not all ranks of the engines loaded the weights: {error}") from error
        if failure := self._failure(stream):
            raise EngineError(failure)
        for key in keys:
            self._names.delete_key(key)

    def _failure(self, stream: Stream) -> str:
        """Return which rank did not load the stream so far, and why; empty if none is known to have failed."""
        names = self._names
        if names is None:  # the group was left
            return ""
        for engine, ranks in zip(self.engines, self._ranks()):
            for number, rank in enumerate(ranks):
                key = stream.outcome_key(rank)
                if names.check([key]) and (reason := names.get(key).decode()):
                    return f"rank {number} of the engine {engine.url} did not load the weights: {reason}"
        return ""

    def _together(
        self, own_part: Callable[[], T], engines_part: Coroutine[Any, Any, None] | None, what: str, *, waits_for_engines: bool = True
    ) -> T:
        """Run both parts concurrently, because each waits for the other, and return the result of `own_part`.

        The first failure or timeout ends the wait with an EngineError. `own_part` runs in a daemon thread: if an engine fails, it may wait
        forever, and a thread cannot be interrupted.

        Args:
            engines_part: None if engines are still busy with their part of the previous call, a stream.
            what: verb phrase for the error message, such as "join the group".
            waits_for_engines: wait for the engines' part too; otherwise it may continue until the next call, which waits for it unless it
                is a stream.
        """
        mine: Future[T] = Future()
        mine.set_running_or_notify_cancel()

        def work() -> None:
            try:
                mine.set_result(own_part())
            except BaseException as error:  # raised in the waiting coroutine
                # The frames keep the group alive in a reference cycle, but waiting engines get an error only when the group is freed.
                clear_frames(error.__traceback__)
                mine.set_exception(error)

        async def both() -> T:
            own = asyncio.wrap_future(mine)
            tasks = [] if self._loading is None else [self._loading]
            self._loading = None
            if engines_part is not None:
                tasks.append(asyncio.create_task(engines_part))
            try:
                async with asyncio.timeout(TIMEOUT.total_seconds()):
                    await _first_failure([own, *tasks], until=[own, *tasks] if waits_for_engines else [own, *tasks[:-1]])
                if not waits_for_engines:
                    self._loading = tasks[-1]
                return own.result()
            finally:
                own.cancel()  # does not wait for the thread
                if self._loading is None:
                    await _end(tasks)

        self._worker = threading.Thread(target=work, name="weights-broadcast", daemon=True)
        self._worker.start()
        try:
            if time.monotonic() - self._last_call_s > IDLE_S and engines_part is not None:
                self._loop.run(self._renew_connections())
            self._last_call_s = time.monotonic()  # the start of the call, because an engine that answers first is idle until the end
            return self._loop.run(both())
        except (EngineError, RuntimeError, TimeoutError) as error:
            raise self._failed(what, str(error) or f"timed out after {TIMEOUT.total_seconds():g} s") from error

    def _failed(self, what: str, cause: str) -> EngineError:
        return EngineError(f"the engines {', '.join(engine.url for engine in self.engines)} did not {what}: {cause}")

    def close(self) -> None:
        """Leave the group, whatever its state. Engines that wait in the group get an error if the backend reports lost peers."""
        if self._group is not None:
            self._group.abort()  # unlike shutdown, abort does not wait for peers, which may be dead
            dist.destroy_process_group(self._group)
            if self._stream is not None:
                free_when_sent(self._group, self._stream, self._worker)
            self._group = self._stream = None

        async def engines_leave() -> None:
            self._store = self._names = None  # engines that still wait for others to join, or for a bucket, then get an error
            await asyncio.gather(*(self._leave(client) for client in self._clients), return_exceptions=True)

        with self._loop:  # closes the loop
            self._loop.run(engines_leave())
            self._loop.run(self._close_connections())

    async def _leave(self, client: InferenceEngine) -> None:
        """Make an engine leave the group. Raises EngineError if it is not in the group, and TimeoutError if it does not leave in time."""
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await client.destroy_weights_update_group(self.name)

    async def _renew_connections(self) -> None:
        if self._loading is not None:
            await asyncio.wait([self._loading])  # the next call raises its error
        await self._close_connections()

    async def _close_connections(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))


async def _first_failure(futures: Sequence[asyncio.Future[Any]], until: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all futures in `until`, a subset of `futures`, are done; raise the first error of any of `futures` until then."""
    running = set(futures)
    while not all(future.done() for future in until):
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
