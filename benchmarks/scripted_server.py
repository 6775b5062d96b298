"""Server of a benchmark in a separate process, so that its CPU time is not counted; it ends with the benchmark."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


async def serve(app: web.Application) -> None:
    """Serve on a free port, print the port, and return when standard input is closed."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent is gone


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[str]:
    """Run a command that calls `serve`; yield the URL of its server."""
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()
