"""The machine of an engine is lost during a request; the client notices long before the request's deadline."""

import subprocess
import sys

import pytest

from tests.cluster.hosts import Network

ENGINE = """
import asyncio, sys
from aiohttp import web

async def wait(request):
    print("asked", flush=True)
    await asyncio.Event().wait()

application = web.Application()
application.router.add_route("*", "/{path:.*}", wait)
web.run_app(application, host=sys.argv[1], port=8000, print=lambda *_: print("listening", flush=True))
"""
ASK = """
import asyncio, sys
from fuligo.engines.client import EngineClient
from fuligo.errors import EngineError

async def ask():
    try:
        await EngineClient(sys.argv[1], timeout_s=300.0).update_weights_from_disk("weights", 1)
    except EngineError as error:
        print(error)

asyncio.run(ask())
"""


@pytest.mark.slow
def test_the_wait_ends(network: Network) -> None:
    far, near, _ = network.hosts
    engine = subprocess.Popen(far.command(sys.executable, "-c", ENGINE, far.address), stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "listening\n"
        command = near.command(sys.executable, "-c", ASK, f"http://{far.address}:8000")
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert engine.stdout.readline() == "asked\n"
        far.unplug()
        said, _ = asking.communicate(timeout=400)
    finally:
        far.plug_in()
        far.kill()
        engine.wait()
    assert "/update_weights_from_disk: failed once" in said, "the lost connection failed the request, not its deadline"
