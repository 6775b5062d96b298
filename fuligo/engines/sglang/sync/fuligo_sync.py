"""Plugin for SGLang 0.5.15 that shortens weight syncs: all weights in one call, and a pause that ends with the last request.

`fuligo_in_flight` keeps requests in the engine instead.

SGLang's own calls take one bucket each. Its model lists its parameters again for each bucket, some models also convert weights after each
(DeepSeek's latent attention), and the next broadcast waits for the answer. Here, `load_weights` reads one stream of tensors, each bucket
while it loads the previous one. Names, data types and shapes come through the sender's TCPStore, a key per bucket, and the bytes by
broadcast in the process group. The sender (`fuligo/weights/broadcast.py`) streams only if every rank of every engine has announced in the
store that it has this plugin.

SGLang's pause that aborts requests checks only once a second whether they have ended, which takes them about a step.
"""

import asyncio
import json
import socket
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import fuligo_in_flight

LOAD_FORMAT = "fuligo_sync"
"""`load_format` of a call that receives a stream; the call's only tensor name is the stream's number."""
BUCKET_WITHIN = timedelta(seconds=300)
"""Longest wait for the next bucket."""
REACHED_WITHIN_S = 10.0
"""Longest wait for a connection to the sender's store, which listens before engines are told to join."""
ROOM_BYTES = 64 * 2**20
"""Unit of the memory for a bucket, so that buckets of similar sizes reuse the allocator's blocks instead of waiting for CUDA's."""
PAUSE_POLL_S, NUM_POLLS = 0.01, 25
"""Seconds between checks of whether the requests that a pause aborted have ended, and their number until it aborts again."""
LATENT = "_a_proj"
"""Part of the names of small tensors that SGLang's latent attention keeps until the next layer. They are copied, since a view would keep
its bucket in memory."""
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def install() -> None:
    """Extend SGLang's calls; SGLang applies the hooks in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in (init_weights_update_group, destroy_weights_update_group, update_weights_from_distributed):
        HookRegistry.register(f"{RUNNER}.{hook.__name__}", hook, HookType.AROUND)
    HookRegistry.register(f"{TOKENIZER_MANAGER}.pause_generation", pause_generation, HookType.AROUND)
    fuligo_in_flight.install()


async def pause_generation(pause: Callable[[Any, Any], Awaitable[None]], manager: Any, request: Any) -> None:
    """Pause the engine; with mode `abort`, end its requests first, and return as soon as they have ended."""
    if request.mode != "abort":
        await pause(manager, request)
        return
    async with manager.is_pause_cond:
        manager.is_pause = True  # later requests wait
        while await manager.model_update_lock.is_locked():  # every request holds it as a reader
            manager.abort_request(abort_all=True)  # again, since some may have been on their way to the scheduler
            for _ in range(NUM_POLLS):
                if not await manager.model_update_lock.is_locked():
                    break
                await asyncio.sleep(PAUSE_POLL_S)


_stores: dict[str, Any] = {}
"""Sender's store by the name of the process group."""


def init_weights_update_group(
    join: Callable[..., tuple[bool, str]],
    runner: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Join the group and announce this rank in the sender's store; fail at once if the sender has closed the group."""
    if reason := unreachable(master_address, master_port):
        listens = f"its sender does not listen at {master_address}:{master_port} ({reason})"
        return False, f"cannot join {group_name}: {listens}: it has closed the group, or this host cannot reach that port"
    joined = join(runner, master_address, master_port, rank_offset, world_size, group_name, backend)
    if joined[0]:
        try:
            _stores[group_name] = store = connect(master_address, master_port, group_name)
            announce(store, rank_offset + runner.tp_rank)
        except Exception:  # the sender then sends each bucket in a call
            traceback.print_exc()
    return joined


def unreachable(host: str, port: int) -> str:
    """Return why the sender's store cannot be reached; "" if it can.

    The sender closes the store when another engine fails to join. torch would retry a closed store for 30 minutes, during which the
    scheduler could neither answer requests nor join the next group.
    """
    try:
        socket.create_connection((host, port), REACHED_WITHIN_S).close()
    except OSError as error:
        return str(error)
    return ""


def destroy_weights_update_group(leave: Callable[..., tuple[bool, str]], runner: Any, group_name: str) -> tuple[bool, str]:
    """Leave the group and disconnect from the sender's store."""
    _stores.pop(group_name, None)
    return leave(runner, group_name)


def update_weights_from_distributed(
    receive_bucket: Callable[..., tuple[bool, str]],
    runner: Any,
    names: list[str],
    dtypes: Any,
    shapes: Any,
    group_name: str,
    load_format: Any = None,
) -> tuple[bool, str]:
    """Load a stream, or pass a call for a bucket on to SGLang."""
    if load_format != LOAD_FORMAT:
        return receive_bucket(runner, names, dtypes, shapes, group_name, load_format)
    try:
        group = runner._model_update_group[group_name]
        Stream(_stores[group_name], names[0], group, runner.device).load(runner.model.load_weights)
    except Exception as error:
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # their broadcasts would keep this rank in the group
        return False, f"cannot load the stream of weights: {type(error).__name__}: {error}; the engine may hold a part of them"
    return True, "Loaded the stream of weights."


def connect(host: str, port: int, group_name: str) -> Any:
    """Return a connection to the sender's store, with the keys of this group."""
    from torch.distributed import PrefixStore, TCPStore

    return PrefixStore(f"{group_name}/stream", TCPStore(host, port, is_master=False, timeout=BUCKET_WITHIN))


def announce(store: Any, rank: int) -> None:
    """Tell the sender that this rank of the group receives streams."""
    store.set(f"rank/{rank}", "")


class Stream:
    """Buckets of one sync. Three are in memory at a time: one loads, one arrives, and the next one can follow it without a gap.

    Args:
        store: store with the names, data types and shapes of the tensors
        number: number of the stream
        group: process group in which the sender broadcasts
        device: device that receives the buckets
    """

    def __init__(self, store: Any, number: str, group: Any, device: Any) -> None:
        self._store = store
        self._number = number
        self._group = group
        self._device = device
        self._num_started = 0
        self._started: deque[tuple[list[list[Any]], Any, Any]] = deque()
        """Buckets whose broadcasts were started: their tensors, memory and broadcasts."""
        self._is_over = False

    def load(self, load_weights: Callable[[Iterator[tuple[str, Any]]], object]) -> None:
        """Pass the names and tensors to `load_weights`, in order.

        It is called once, unless the model keeps tensors: SGLang's gpt-oss sorts all that it gets. A call then ends after the bucket in
        which this is noticed, and the next call gets the rest.

        The outcome is told to the sender through the store, because SGLang answers with the outcome of an engine's first rank only.

        Raises torch.distributed.DistError if the sender is lost or the next bucket is late, and RuntimeError if the model leaves tensors.
        """
        outcome = f"{self._number}/rank/{self._group.rank()}"
        try:
            self._load(load_weights)
        except Exception as error:
            with suppress(Exception):  # the sender may be lost
                self._store.set(outcome, f"{type(error).__name__}: {error}")
            raise
        self._store.set(outcome, "")

    def _load(self, load_weights: Callable[[Iterator[tuple[str, Any]]], object]) -> None:
        self._start()
        while self._started:
            self._start()
            tensors = self._tensors()
            load_weights(tensors)
            if next(tensors, None) is not None:
                raise RuntimeError("the model did not read all tensors")

    def _start(self) -> None:
        """Start the broadcast of the next bucket, if there is one."""
        import torch
        import torch.distributed as dist

        if self._is_over:
            return
        tensors = json.loads(self._store.get(f"{self._number}/{self._num_started}"))
        self._num_started += 1
        if tensors is None:
            self._is_over = True
            return
        num_bytes = sum(size for *_, size in tensors)
        row = torch.empty(-(-num_bytes // ROOM_BYTES) * ROOM_BYTES, dtype=torch.uint8, device=self._device)[:num_bytes]
        self._started.append((tensors, row, dist.broadcast(row, src=0, group=self._group, async_op=True)))

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and tensors of the stream; end early, after a bucket, if the model still holds the previous bucket.

        That is checked when the first tensor of a bucket has been loaded. If the previous bucket is free by then, the broadcast of the
        second bucket after the current one starts.
        """
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        previous: StorageWeakRef | None = None
        while self._started:
            tensors, row, arrival = self._started.popleft()
            arrival.wait()
            del arrival  # it keeps the bucket
            start, is_first, is_previous_kept = 0, True, False
            for name, dtype, shape, num_bytes in tensors:
                part, data_type = row[start : start + num_bytes], getattr(torch, dtype)
                if start % data_type.itemsize or LATENT in name:  # a view must be aligned
                    part = part.clone()
                yield name, part.view(data_type).reshape(shape)
                start += num_bytes
                if is_first:
                    is_first, is_previous_kept = False, previous is not None and not previous.expired()
                    if not is_previous_kept:
                        self._start()
            if is_previous_kept:
                return
            previous = StorageWeakRef(row.untyped_storage())
            del row
