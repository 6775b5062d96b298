"""An engine that stops with its connections open, behind the real router. The engines are scripted, since SGLang starts slowly."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.server_process import ServerProcess
from fuligo.engines.sglang.fleet import Fleet
from fuligo.engines.sglang.server import ServerSettings, SGLangServer
from tests.e2e.processes import descendants
from tests.sglang.conftest import fleet_settings

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


ENGINE = """
import asyncio, sys
from pathlib import Path
from aiohttp import web

HOLD, ASKED = (Path(sys.argv[3]) / f"{name}-{sys.argv[2]}" for name in ("hold", "asked"))

async def generate(request):
    body = await request.json()
    ASKED.touch()
    while HOLD.exists():
        await asyncio.sleep(0.05)
    num_tokens = body["sampling_params"]["max_new_tokens"]
    meta = {"finish_reason": {"type": "length"}, "prompt_tokens": len(body["input_ids"]), "completion_tokens": num_tokens,
            "cached_tokens": 0, "weight_version": f"0@{sys.argv[2]}", "output_token_logprobs": [[-1.0, 7, None]] * num_tokens}
    return web.json_response({"text": "", "output_ids": [7] * num_tokens, "meta_info": meta})

async def succeed(request):
    return web.json_response({"success": True, "model_path": "scripted", "is_generation": True})

application = web.Application()
application.router.add_post("/generate", generate)
application.router.add_route("*", "/{path:.*}", succeed)
web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


class ScriptedServer(SGLangServer):
    """Scripted server with a short grace period: a stopped process does not react to SIGTERM."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.url = settings, settings.url
        command = [sys.executable, "-c", ENGINE, str(settings.ports.http), str(settings.number), str(settings.log_file.parent)]
        ServerProcess.__init__(self, settings.name, command, log_file=settings.log_file, grace_s=1.0)

    async def wait_ready(self) -> None:
        """Wait without checking that the server requires a key: it has none."""
        await self.wait_until(lambda: self.answers(5.0), 240.0)


@pytest_asyncio.fixture
async def fleet(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.launch(fleet_settings(checkpoint, claims, tmp_path, health_timeout_s=10.0), ScriptedServer)
    yield fleet
    await fleet.stop()


async def test_its_requests_finish_elsewhere_and_it_comes_back(fleet: Fleet) -> None:
    renewed = asyncio.Event()

    async def renew(client: EngineClient) -> bool:
        await fleet.group.admit([client])
        renewed.set()
        return True

    fleet.sync_restarted = renew
    watch = asyncio.create_task(fleet.watch())
    victim, other = fleet.servers
    assert isinstance(victim, ScriptedServer)
    hold, asked = (victim.settings.log_file.parent / f"{name}-{victim.settings.number}" for name in ("hold", "asked"))
    hold.touch()  # the engine answers nothing before it is stopped
    requests = [asyncio.create_task(fleet.group.generate([1, 2, 3], PARAMS, rid=f"{n}", timeout_s=240)) for n in range(8)]
    while not asked.exists():  # noqa: ASYNC110  # another process writes it
        await asyncio.sleep(0.05)
    for pid in descendants(victim.pid):
        os.kill(pid, signal.SIGSTOP)
    hold.unlink()
    assert {generation.engine for generation in await asyncio.gather(*requests)} == {other.settings.number}
    await asyncio.wait_for(renewed.wait(), 120)
    assert set(fleet.group.urls) == {server.url for server in fleet.servers}
    assert {worker.url for worker in await fleet.router.workers()} == set(fleet.group.urls)
    assert not watch.done()
    watch.cancel()
