"""Colocated weight sync: each rank shares memory of its GPU, and an engine receives one payload per rank, in order."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from fuligo.formats.payload import SHARED_MEMORY, decode_named_tensors
from fuligo.formats.weight_manifest import EngineAddress, Undelivered, WeightTarget
from fuligo.weights.colocated import TrainerRanks
from fuligo.weights.senders import WeightSender

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a POSIX shared memory file system")

Engines = list[tuple[str, tuple[int, ...]]]
"""Address of each engine, and the trainer ranks whose GPUs it shares."""


def run_rank(rank: int, size: int, port: int, engines: Engines, reply: Connection) -> None:
    """Send weights as one of `size` ranks; reply with what the sender reports."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    sender = WeightSender(ranks=TrainerRanks(rank, dist.group.WORLD))
    addresses = tuple(
        EngineAddress(url, len(ranks) or 1, number=number, trainer_ranks=ranks) for number, (url, ranks) in enumerate(engines)
    )
    weights = [("rank", torch.full((3,), float(rank))), ("same", torch.arange(5.0))]  # a bucket each
    sent = sender.send(iter(weights), WeightTarget("tensor", 7, 16, addresses))
    reply.send(sent.reason if isinstance(sent, Undelivered) else f"sent {None if sent is None else sent.num_bytes}")
    del sender  # else the group, and gloo's threads, which drop tensors of its last collective, outlive the interpreter
    dist.destroy_process_group()


class Engine:
    """Engine that receives one payload for each of its ranks, as SGLang does."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.buckets: list[tuple[list[dict[str, list[float]]], str | None]] = []
        """(payload of each rank, version) of each bucket."""
        self.url = ""
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(ready,), daemon=True).start()
        assert ready.wait(60)

    async def take(self, request: web.Request) -> web.Response:
        if self.refuses:
            return web.json_response({"success": False, "message": "no room"})
        body: dict[str, Any] = await request.json()
        ranks = [{name: tensor.tolist() for name, tensor in decode_named_tensors(payload)} for payload in body["serialized_named_tensors"]]
        self.buckets.append((ranks, body.get("weight_version")))
        return web.json_response({"success": True})

    def _serve(self, ready: threading.Event) -> None:
        async def start() -> None:
            app = web.Application()
            app.router.add_post("/update_weights_from_tensor", self.take)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()

        self.loop.run_until_complete(start())
        self.loop.run_forever()


@pytest.fixture
def make_engine() -> Iterator[Any]:
    engines: list[Engine] = []

    def make(**how: Any) -> Engine:
        engines.append(Engine(**how))
        return engines[-1]

    yield make
    for engine in engines:
        engine.loop.call_soon_threadsafe(engine.loop.stop)


@pytest.fixture
def send() -> Callable[..., list[str]]:
    def send(size: int, engines: list[tuple[Engine, tuple[int, ...]]]) -> list[str]:
        """Return what each of `size` ranks reports about its send to the engines on its GPUs."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = [(engine.url, ranks) for engine, ranks in engines]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fuligo.weights.senders"])  # imported once for all ranks
        ends = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [context.Process(target=run_rank, args=(rank, size, store.port, where, ends[rank][1])) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(240)
        assert [rank.exitcode for rank in ranks] == [0] * size
        return [receiving.recv() for receiving, _ in ends]

    return send


def bucket(ranks: list[float], name: str) -> list[dict[str, list[float]]]:
    return [{name: [rank] * 3 if name == "rank" else torch.arange(5.0).tolist()} for rank in ranks]


def test_an_engine_of_two_ranks_and_one_of_its_own(make_engine: Any, send: Callable[..., list[str]]) -> None:
    """Ranks 0 and 1 share GPUs with the first engine; rank 0 also serves the second, which has its own GPU; rank 2 serves none."""
    wide, apart = make_engine(), make_engine()
    assert send(3, [(wide, (0, 1)), (apart, ())]) == ["sent 32", "sent 32", "sent None"]
    assert wide.buckets == [(bucket([0.0, 1.0], "rank"), None), (bucket([0.0, 1.0], "same"), "7@0")]
    assert apart.buckets == [(bucket([0.0], "rank"), None), (bucket([0.0], "same"), "7@1")]


def test_every_rank_gets_the_error_of_an_engine_that_refuses(make_engine: Any, send: Callable[..., list[str]]) -> None:
    """A refusal reaches every rank, including rank 0, which reports to the driver; the other engine still gets its weights, and no rank
    waits."""
    good, refusing = make_engine(), make_engine(refuses=True)
    said = send(4, [(good, (0,)), (refusing, (1, 2))])
    assert said == [f"engine {refusing.url} refused /update_weights_from_tensor: no room"] * 4, "once, not once for each of its ranks"
    assert len(good.buckets) == 2
