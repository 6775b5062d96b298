"""A broadcast that fails on an engine ends at once and names the engine, even if the sender still waits in the process group."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed import HashStore, PrefixStore

from fuligo.engines.client import EngineClient
from fuligo.engines.host import PortClaims, listening_store
from fuligo.errors import EngineError
from fuligo.formats.weight_manifest import EngineAddress
from fuligo.weights import broadcast, stream
from fuligo.weights.broadcast import BroadcastGroup
from tests.unit.weights.dying_engine import DyingServer, Held
from tests.unit.weights.test_sync import fleet_settings


class RefusingEngine:
    """Engine that refuses everything."""

    def __init__(self) -> None:
        self.url = ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(ready,), daemon=True).start()
        assert ready.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self, ready: threading.Event) -> None:
        async def refuse(request: web.Request) -> web.Response:
            await asyncio.to_thread(self.may_answer.wait)
            return web.json_response({"success": False, "message": f"no {request.path} here"})

        async def start() -> None:
            app = web.Application()
            app.router.add_post("/{path}", refuse)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()


@pytest.fixture
def engine() -> Iterator[RefusingEngine]:
    engine = RefusingEngine()
    yield engine
    engine.stop()


@pytest.mark.timeout(60)
def test_an_engine_that_does_not_join_is_named(engine: RefusingEngine) -> None:
    with pytest.raises(EngineError, match=rf"the engines {engine.url} did not join the gloo group: .*no /init_weights_update_group here"):
        BroadcastGroup([EngineAddress(engine.url)], "gloo", "127.0.0.1")


def joined_group(engine: RefusingEngine) -> BroadcastGroup:
    """Return a group that all members have joined."""
    group = object.__new__(BroadcastGroup)
    group.engines, group.name = (EngineAddress(engine.url),), "g"
    group._clients, group._device = [EngineClient(engine.url, retries=0)], torch.device("cpu")
    group._group, group._loop, group._last_call_s, group._loading = None, asyncio.Runner(), time.monotonic(), None
    group.streams, group._stream = False, None
    return group


@pytest.mark.timeout(60)
def test_an_engine_that_does_not_receive_is_named(engine: RefusingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the sender stays in the collective."""
    group = joined_group(engine)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: threading.Event().wait())
    with pytest.raises(EngineError, match=r"did not load a bucket of 16 bytes: .*no /update_weights_from_distributed here"):
        group.broadcast([("weight", torch.zeros(4))], version=1, is_last=True)
    group.close()  # as the sender does after an error; it closes the connections that a bucket leaves open


@pytest.mark.timeout(60)
def test_a_bucket_is_sent_while_engines_load_the_one_before(engine: RefusingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call raises if they could not load it."""
    group = joined_group(engine)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    engine.may_answer.clear()
    group.broadcast([("weight", torch.zeros(4))], version=1, is_last=False)
    engine.may_answer.set()
    with pytest.raises(EngineError, match=r"did not load a bucket of 32 bytes or the previous one: .*no /update_weights_from_distributed"):
        group.broadcast([("other", torch.zeros(8))], version=1, is_last=True)
    group.close()


@pytest.fixture
async def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DyingServer]:
    """Start a working engine in its own process."""
    monkeypatch.setattr(broadcast, "LEAVE_TIMEOUT_S", 3.0)
    with PortClaims() as claims:
        server = DyingServer(fleet_settings(tmp_path, claims, num_engines=1).servers[0])
        await server.wait_ready()
        yield server
        await server.stop()


async def scheduler_answers(server: DyingServer) -> bool:
    client = EngineClient(server.url, retries=0)
    try:
        return await client.scheduler_answers(20.0)  # torch takes seconds to write down where a call of its own failed
    finally:
        await client.close()


async def test_an_engine_that_waits_for_others_to_join_gets_an_error_when_the_sender_fails(
    receiver: DyingServer, engine: RefusingEngine
) -> None:
    """The engine accepts other calls while the failed call still holds the group."""
    engine.may_answer.clear()
    engines = [EngineAddress(receiver.url), EngineAddress(engine.url)]
    joining = asyncio.create_task(asyncio.to_thread(BroadcastGroup, engines, "gloo", "127.0.0.1"))
    while not (await Held.of(receiver.url)).joining:  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(0.02)
    engine.may_answer.set()
    with pytest.raises(EngineError, match="no /init_weights_update_group here") as failed:
        await joining
    assert await scheduler_answers(receiver)
    assert failed.tb is not None


async def test_a_new_sender_joins_an_engine_that_a_lost_one_left_in_its_group(
    receiver: DyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process counts its groups from 0, and torch refuses two groups of one name."""
    engines = [EngineAddress(receiver.url)]
    monkeypatch.setattr(broadcast, "_numbers", count())
    lost = await asyncio.to_thread(BroadcastGroup, engines, "gloo", "127.0.0.1")
    dist.destroy_process_group(lost._group)  # as if its process were gone

    monkeypatch.setattr(broadcast, "_numbers", count())
    group = await asyncio.to_thread(BroadcastGroup, engines, "gloo", "127.0.0.1")
    assert group.name == lost.name
    await asyncio.to_thread(group.broadcast, [("a", torch.full((4,), 7.0))], version=3, is_last=True)
    held = await Held.of(receiver.url)
    assert (held.weights, held.version) == ({"a": [7.0] * 4}, 3)
    await asyncio.to_thread(group.close)


@pytest.mark.timeout(120)
async def test_an_engine_told_to_join_a_closed_group_refuses_and_joins_the_next_one(receiver: DyingServer) -> None:
    """Another engine died and ended the attempt before this one was asked to join; torch would keep retrying the closed store."""
    store = listening_store("127.0.0.1")
    port = store.port
    del store
    client = EngineClient(receiver.url, retries=0)
    with pytest.raises(EngineError, match="refused"):
        await client.init_weights_update_group(
            host="127.0.0.1", port=port, rank_offset=1, world_size=3, group_name="given-up", backend="gloo"
        )
    await client.close()
    group = await asyncio.to_thread(BroadcastGroup, [EngineAddress(receiver.url)], "gloo", "127.0.0.1")
    await asyncio.to_thread(group.broadcast, [("a", torch.full((4,), 7.0))], version=3, is_last=True)
    assert (await Held.of(receiver.url)).weights == {"a": [7.0] * 4}
    await asyncio.to_thread(group.close)


def test_a_group_is_left_without_waiting_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL tears a group down together with its peers unless it was aborted before, and a peer may be gone."""

    class Group:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    def destroy(left: Group) -> None:
        assert left.aborted, "it waits for good"

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    group = object.__new__(BroadcastGroup)
    group.engines, group.name, group._clients, group._loop = (), "g", [], asyncio.Runner()
    group._stream = None
    group._group = Group()
    group.close()
    assert group._group is None


def test_a_broadcast_ends_with_the_reason_of_a_rank_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank no longer receives, so the broadcast never ends, and its engine's answer is that of another rank."""

    class Waiting:
        num_polls = 0

        def is_completed(self) -> bool:
            self.num_polls += 1
            return False

    monkeypatch.setattr(stream, "FAILURE_POLL_S", 0.0)
    work = Waiting()
    with pytest.raises(EngineError, match="rank 1 of the engine did not load the weights: no room"):
        stream.wait_until_sent(
            work,
            60.0,
            lambda: "rank 1 of the engine did not load the weights: no room" if work.num_polls > 2 else "",
        )
    with pytest.raises(EngineError, match="timed out after 0 s"):
        stream.wait_until_sent(work, 0.0, str)


def test_engines_of_which_a_rank_lacks_the_plugin_receive_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "ANNOUNCED_WITHIN", timedelta(seconds=0.1))
    group = object.__new__(BroadcastGroup)
    group.engines = (EngineAddress("a", num_ranks=2), EngineAddress("b"))
    store = PrefixStore("stream", HashStore())
    assert not group._all_stream(store)
    for rank in (1, 3):  # rank 2 is the second of engine a
        store.set(f"rank/{rank}", "")
    assert not group._all_stream(store)
    store.set("rank/2", "")
    assert group._all_stream(store)
