"""Engines with the plugin `fuligo_sync` receive all weights of a sync in one call."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.multiprocessing.reductions import StorageWeakRef

from fuligo.errors import EngineError, WeightSyncError
from fuligo.weights import broadcast
from tests.unit.weights.dying_engine import STREAMED, UNANSWERED, Fault, fuligo_sync
from tests.unit.weights.test_sync import Open, open_world  # noqa: F401  # a fixture

EVERY = (0, 1, 2)


async def test_a_sync_is_one_call(open_world: Open) -> None:  # noqa: F811
    async with open_world("gloo", {}, streaming=EVERY) as world:
        for version in (1, 2, 3):
            world.trainer.set(a=float(version), b=2.0, c=-float(version))
            assert await world.weight_sync.sync() == version
            await world.assert_all_serve(version)
            assert [(held.num_calls, held.num_taken) for held in await world.held()] == [(version, 3 * version)] * 3


async def test_the_store_does_not_grow(open_world: Open) -> None:  # noqa: F811
    async with open_world("gloo", {}, streaming=(0,), num_engines=1) as world:
        num_keys = []
        for _ in range(4):
            await world.weight_sync.sync()
            num_keys.append(world.trainer.sender._group._store.num_keys())
        assert num_keys[1:] == num_keys[1:2] * 3


async def test_one_engine_without_the_plugin_makes_every_bucket_a_call(open_world: Open) -> None:  # noqa: F811
    async with open_world("gloo", {}, streaming=(0, 2)) as world:
        world.trainer.set(a=1.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)
        assert [held.num_calls for held in await world.held()] == [3, 3, 3]


@pytest.mark.parametrize("tensor", [1, 2, 3])
async def test_an_engine_that_dies_in_a_stream_comes_back_and_all_have_the_weights(open_world: Open, tensor: int) -> None:  # noqa: F811
    async with open_world("gloo", {1: Fault(STREAMED, "dies", tensor)}, streaming=EVERY) as world:
        world.trainer.set(a=1.0, b=2.0, c=3.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)
        assert all(held.served_unpaused[0] == 1 for held in await world.held()), "none samples with a part of the weights"


@pytest.mark.parametrize("tensor", [1, 2, 3])
async def test_an_engine_that_cannot_load_ends_the_sync(open_world: Open, tensor: int) -> None:  # noqa: F811
    async with open_world("gloo", {0: Fault(STREAMED, "refuses", tensor)}, streaming=EVERY) as world:
        with pytest.raises(EngineError, match=r"did not load a bucket of 16 bytes.*no room"):
            await world.weight_sync.sync()
        assert [held.served_unpaused for held in await world.held()] == [[], [], []]
        world.trainer.set(a=1.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)


async def test_a_rank_that_cannot_load_ends_the_sync_although_its_engine_answers(open_world: Open) -> None:  # noqa: F811
    async with open_world("gloo", {1: Fault(UNANSWERED, "refuses")}, streaming=EVERY) as world:
        with pytest.raises(EngineError, match=r"rank 0 of the engine http\S+ did not load the weights: RuntimeError: no room"):
            await world.weight_sync.sync()
        assert [held.served_unpaused for held in await world.held()] == [[], [], []]


@pytest.mark.long
async def test_an_engine_that_hangs_in_a_stream_is_restarted(open_world: Open, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The limit is short only for the bucket that hangs: joining, and the start of the next engine, may be slow on a busy machine."""
    usual = broadcast.TIMEOUT
    async with open_world("gloo", {0: Fault(STREAMED, "hangs", 5)}, num_engines=1, streaming=(0,), health_timeout_s=2.0) as world:
        assert await world.weight_sync.sync() == 1
        world.trainer.set(a=1.0)
        monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=2))
        syncing = asyncio.create_task(world.weight_sync.sync())
        while world.fleet.group.clients and not syncing.done():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)
        monkeypatch.setattr(broadcast, "TIMEOUT", usual)
        assert await syncing == 2
        await world.assert_all_serve(2)
        assert [client.start for client in world.fleet.group.clients] == [1]


async def test_engines_stop_waiting_for_a_trainer_that_cannot_gather(open_world: Open) -> None:  # noqa: F811
    """Their schedulers are free again for the next sync."""
    async with open_world("gloo", {}, streaming=EVERY) as world:
        weights = world.trainer.weights

        class Failing(dict[str, torch.Tensor]):
            def items(self) -> Iterator[tuple[str, torch.Tensor]]:
                yield from list(weights.items())[:2]
                raise WeightSyncError("a weight is not finite")

        world.trainer.weights = Failing(weights)
        with pytest.raises(WeightSyncError, match="not finite"):
            await world.weight_sync.sync()
        world.trainer.weights = weights
        world.trainer.set(c=5.0)
        assert await world.weight_sync.sync() == 1
        await world.assert_all_serve(1)


BUCKETS = [
    [("a", torch.arange(3, dtype=torch.uint8)), ("b", torch.randn(2, 3)), ("c", torch.randn(5).to(torch.float8_e4m3fn))],
    [("d", torch.randn(4, dtype=torch.bfloat16))],
    [("e", torch.ones(1, dtype=torch.int8)), ("f", torch.randn((), dtype=torch.float64))],
    [("g", torch.randn(0, 2)), ("h", torch.randn(7))],
    [("i", torch.randn(2))],
]
WEIGHTS = {name: tensor for bucket in BUCKETS for name, tensor in bucket}
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Rows:
    """Receiver of `BUCKETS` that counts the buckets in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = list[StorageWeakRef]()
        self.most_in_memory = 0
        store = HashStore()
        for number, bucket in enumerate(BUCKETS):
            tensors = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes) for name, tensor in bucket]
            store.set(f"7/{number}", json.dumps(tensors))
        store.set(f"7/{len(BUCKETS)}", "null")
        monkeypatch.setattr(dist, "broadcast", self._broadcast)
        self.stream = fuligo_sync.Stream(store, "7", SimpleNamespace(rank=lambda: 1), "cpu")

    def _broadcast(self, row: torch.Tensor, **_: Any) -> SimpleNamespace:
        row.copy_(torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in BUCKETS[len(self.rows)]]))
        self.rows.append(StorageWeakRef(row.untyped_storage()))
        self.most_in_memory = max(self.most_in_memory, sum(not row.expired() for row in self.rows))
        return SimpleNamespace(wait=lambda: None, keeps=row)

    def check(self, tensors: NamedTensors) -> list[str]:
        """Check the values of tensors, and return the names."""
        names = []
        for name, tensor in tensors:
            assert tensor.dtype == WEIGHTS[name].dtype and torch.equal(tensor.double(), WEIGHTS[name].double())
            names.append(name)
        return names


def test_three_buckets_are_in_memory_and_tensors_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, calls = Rows(monkeypatch), list[list[str]]()
    rows.stream.load(lambda tensors: calls.append(rows.check(tensors)))
    assert calls == [list("abcdefghi")]
    assert rows.most_in_memory == 3


def test_a_model_that_lists_all_tensors_gets_two_buckets_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like SGLang's gpt-oss."""
    rows, calls = Rows(monkeypatch), list[list[str]]()
    rows.stream.load(lambda tensors: calls.append(rows.check(sorted(tensors, key=lambda named: named[0]))))
    assert calls == [list("abcd"), list("efgh"), ["i"]]
    assert rows.most_in_memory == 3


def test_a_model_that_keeps_one_tensor_gets_the_rest_in_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, calls = Rows(monkeypatch), list[list[str]]()

    def load(tensors: NamedTensors) -> None:
        kept = None
        calls.append([])
        for name, tensor in tensors:
            calls[-1] += rows.check([(name, tensor)])
            if name == "d":
                kept = tensor
        del kept

    rows.stream.load(load)
    assert calls == [list("abcdef"), list("ghi")]
    assert rows.most_in_memory == 3


def test_a_model_that_leaves_tensors_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="did not read all tensors"):
        Rows(monkeypatch).stream.load(next)
