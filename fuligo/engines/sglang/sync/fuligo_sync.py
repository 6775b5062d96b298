"""Plugin for SGLang 0.5.15 that shortens weight syncs: all weights in one call, and a pause that ends with the last request.

SGLang's own calls take one bucket each. Its model lists its parameters again for each bucket, some models also convert weights after each
(DeepSeek's latent attention), and the next broadcast waits for the answer. Here, `load_weights` reads one stream of tensors, each bucket
while it loads the previous one. Names, data types and shapes come through the sender's TCPStore, a key per bucket, and the bytes by
broadcast in the process group. The sender (`fuligo/weights/broadcast.py`) streams only if every rank of every engine has announced in the
store that it has this plugin.

SGLang's pause that aborts requests looks only once a second whether they have ended, which takes them about a step.
"""

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

LOAD_FORMAT = "fuligo_sync"
"""`load_format` of a call that receives a stream; its only name is the stream's number."""
BUCKET_WITHIN = timedelta(seconds=300)
"""Longest wait for the next bucket."""
PAUSE_POLL_S = 0.01
"""Seconds between checks whether the requests that a pause aborted have ended."""
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def install() -> None:
    """Extend SGLang's calls; SGLang applies the hooks in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for hook in (init_weights_update_group, destroy_weights_update_group, update_weights_from_distributed):
        HookRegistry.register(f"{RUNNER}.{hook.__name__}", hook, HookType.AROUND)
    HookRegistry.register(f"{TOKENIZER_MANAGER}.pause_generation", pause_generation, HookType.AROUND)


async def pause_generation(pause: Callable[[Any, Any], Awaitable[None]], manager: Any, request: Any) -> None:
    """Pause the engine; with mode `abort`, end its requests first, and return as soon as they have ended."""
    if request.mode != "abort":
        await pause(manager, request)
        return
    async with manager.is_pause_cond:
        manager.is_pause = True  # later requests wait
        manager.abort_request(abort_all=True)
        while await manager.model_update_lock.is_locked():  # every request holds it as a reader
            await asyncio.sleep(PAUSE_POLL_S)
            manager.abort_request(abort_all=True)  # some may have been on their way to the scheduler


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
    """Join the group, and announce this rank in the sender's store."""
    joined = join(runner, master_address, master_port, rank_offset, world_size, group_name, backend)
    if joined[0]:
        try:
            _stores[group_name] = store = connect(master_address, master_port, group_name)
            announce(store, rank_offset + runner.tp_rank)
        except Exception:  # the sender then sends each bucket by a call
            traceback.print_exc()
    return joined


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
        runner.model.load_weights(received(_stores[group_name], names[0], group, runner.device))
    except Exception as error:
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # their broadcasts would keep this rank in the group
        return False, f"cannot load the stream of weights: {type(error).__name__}: {error}; the engine may hold a part of them"
    return True, "Loaded the stream of weights."


def connect(host: str, port: int, group_name: str) -> Any:
    """Return a connection to the sender's store, with the keys of this group."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return PrefixStore(f"{group_name}/stream", TCPStore(host, port, is_master=False, timeout=BUCKET_WITHIN))


def announce(store: Any, rank: int) -> None:
    """Tell the sender that this rank of the group receives streams."""
    store.set(f"rank/{rank}", "")


def received(store: Any, stream: str, group: Any, device: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of a stream in order; two buckets are in memory at a time.

    The broadcast of a bucket is started after the first tensor of the previous one has been loaded, which frees the memory of the bucket
    before that.

    Raises torch.distributed.DistError if the sender is lost or the next bucket is late.
    """
    import torch
    import torch.distributed as dist

    def receive(number: int) -> tuple[list[list[Any]], torch.Tensor, Any] | None:
        tensors = json.loads(store.get(f"{stream}/{number}"))
        if tensors is None:
            return None
        row = torch.empty(sum(num_bytes for *_, num_bytes in tensors), dtype=torch.uint8, device=device)
        return tensors, row, dist.broadcast(row, src=0, group=group, async_op=True)

    number, bucket = 0, receive(0)
    while bucket is not None:
        (tensors, row, arrival), bucket = bucket, None
        arrival.wait()
        number += 1
        start, is_first = 0, True
        for name, dtype, shape, num_bytes in tensors:
            part, data_type = row[start : start + num_bytes], getattr(torch, dtype)
            if start % data_type.itemsize:  # a view must be aligned
                part = part.clone()
            yield name, part.view(data_type).reshape(shape)
            start += num_bytes
            if is_first:
                is_first, bucket = False, receive(number)
        del row
