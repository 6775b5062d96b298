"""Real engines whose processes start ahead of SGLang's imports, as on a GPU: how they start and how they end.

Here they fork from a process that has imported SGLang. test_turns.py has an engine whose processes import it.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import SGLangServer
from fuligo.errors import EngineError
from tests.e2e.processes import alive, descendants
from tests.sglang.engines import AHEAD, server_settings

SET_BEFORE_SPAWN = b"SGLANG_RUN_ID="
"""Variable that SGLang sets in its main process: processes that it spawned had it from the beginning."""
CHILDREN = {
    "scheduler": ("sglang::scheduler", "managers.scheduler'"),
    "detokenizer": ("sglang::detokenizer", "managers.detokenizer_manager'"),
}
"""Title of each process, which SGLang sets if setproctitle is installed, and the end of its command's module."""


@pytest_asyncio.fixture
async def server(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> AsyncIterator[SGLangServer]:
    server = SGLangServer(server_settings("engine 0", checkpoint, claims, tmp_path / "engine-0.txt", number=0, environment=AHEAD))
    try:
        await server.wait_ready()
        yield server
    finally:
        await server.stop()


def children_of(server: SGLangServer) -> dict[str, int]:
    """Return the pids of an engine's scheduler and detokenizer."""
    commands = descendants(server.pid)
    return {name: pid for pid, command in commands.items() for name, parts in CHILDREN.items() if any(part in command for part in parts)}


def was_spawned_by_sglang(pid: int) -> bool:
    return SET_BEFORE_SPAWN in Path(f"/proc/{pid}/environ").read_bytes()


def assert_started_ahead(server: SGLangServer) -> None:
    """Check that SGLang uses the processes that were started ahead, and that none had to be started anew."""
    children = children_of(server)
    assert set(children) == set(CHILDREN)
    assert not any(was_spawned_by_sglang(pid) for pid in children.values())
    messages = [line for line in server.settings.log_file.read_text().splitlines() if "fuligo:" in line]
    assert all("cannot precompile kernels" in line for line in messages), messages


async def ends(server: SGLangServer, processes: dict[int, str]) -> None:
    async with asyncio.timeout(120):
        while server.alive or alive(processes):  # noqa: ASYNC110  # processes can only be polled
            await asyncio.sleep(0.1)


def copy_with_broken_weights(checkpoint: Path, to: Path) -> Path:
    shutil.copytree(checkpoint, to)
    for file in to.glob("*.safetensors"):
        file.write_bytes(b"broken")
    return to


async def test_its_processes_were_started_ahead_and_end_with_the_scheduler(server: SGLangServer) -> None:
    processes, children = descendants(server.pid), children_of(server)
    log = server.settings.log_file
    assert_started_ahead(server)
    os.kill(children["scheduler"], signal.SIGKILL)
    await ends(server, processes)
    assert "Subprocess scheduler_0" in log.read_text()
    with pytest.raises(EngineError, match="engine 0"):
        server.check_alive()


async def test_its_processes_end_with_the_main_process(server: SGLangServer) -> None:
    processes = descendants(server.pid)
    [main] = [pid for pid, command in processes.items() if "sglang.launch_server" in command and "engines/guard.py" not in command]
    os.kill(main, signal.SIGKILL)
    await ends(server, processes)


async def test_a_scheduler_that_fails_while_it_loads_ends_the_engine(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> None:
    """The exception of a scheduler reaches SGLang's main process as a signal to the parent."""
    broken = copy_with_broken_weights(checkpoint, tmp_path / "model")
    log = tmp_path / "engine-0.txt"
    server = SGLangServer(server_settings("engine 0", broken, claims, log, number=0, environment=AHEAD))
    try:
        with pytest.raises(EngineError, match="engine 0"):
            await server.wait_ready()
    finally:
        await server.stop()
    assert "Scheduler hit an exception" in log.read_text() and "Received sigquit from a child process" in log.read_text()


async def test_refused_arguments_end_the_engine(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> None:
    settings = server_settings("engine 0", checkpoint, claims, tmp_path / "engine-0.txt", environment=AHEAD, arguments={"no_such_flag": 1})
    server = SGLangServer(settings)
    try:
        with pytest.raises(EngineError, match="no-such-flag"):
            await server.wait_ready()
    finally:
        await server.stop()
