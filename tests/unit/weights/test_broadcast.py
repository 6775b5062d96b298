"""A broadcast that an engine fails ends at once and names it, whatever our own end of the process group is waiting for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch
from aiohttp import web

from fuligo.engines.client import EngineClient
from fuligo.errors import EngineError
from fuligo.weights.broadcast import BroadcastGroup
from fuligo.weights.manifest import EngineAddress


class RefusingEngine:
    """An engine that says no to everything."""

    def __init__(self) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(ready,), daemon=True).start()
        assert ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self, ready: threading.Event) -> None:
        async def refuse(request: web.Request) -> web.Response:
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
def test_an_engine_that_does_not_join(engine: RefusingEngine) -> None:
    with pytest.raises(EngineError, match=rf"the engines {engine.url} did not join the gloo group: .*no /init_weights_update_group here"):
        BroadcastGroup([EngineAddress(engine.url)], "gloo", "127.0.0.1")


@pytest.mark.timeout(60)
def test_an_engine_that_does_not_receive(engine: RefusingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our end is in the collective meanwhile, and stays there."""
    group = object.__new__(BroadcastGroup)  # as it is once all have joined
    group.engines, group.name = (EngineAddress(engine.url),), "g"
    group._clients, group._device = [EngineClient(engine.url, retries=0)], torch.device("cpu")
    monkeypatch.setattr(group, "_broadcast", lambda row: threading.Event().wait())
    with pytest.raises(EngineError, match=r"did not take a bucket of 16 bytes: .*no /update_weights_from_distributed here"):
        group.broadcast([("weight", torch.zeros(4))], version=1)
