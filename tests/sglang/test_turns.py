"""With --colocate, an engine is imported while the trainer loads, and uses its GPUs once the trainer has left them."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet
from fuligo.engines.sglang.server import KERNELS_VARIABLE, SYNC_PLUGIN, TURN_PLUGIN, TURN_VARIABLE, SGLangServer
from fuligo.engines.sglang.turns import fuligo_turns
from fuligo.errors import EngineError
from tests.e2e.processes import descendants
from tests.sglang.conftest import SEEN_S, fleet_settings
from tests.sglang.engines import SPAWNING, STUBS, server_settings, sglang_python
from tests.sglang.test_ahead import assert_started_ahead

NO_KERNELS = {KERNELS_VARIABLE: "{}"}
"""Request for kernels as on a GPU, which is read and removed while the engine starts, but asks for no kernel."""


async def test_an_engine_loads_weights_once_it_has_its_turn_and_is_named_when_it_dies(
    nothing_shared_stays: None, checkpoint: Path, claims: PortClaims, tmp_path: Path
) -> None:
    """It starts its processes ahead as on a GPU, by an --engine-python script that replaces PYTHONPATH, and each imports SGLang.

    Without fault tolerance, its end is that of the run, and leaves nothing behind.
    """
    turn, log, script = tmp_path / "turn", tmp_path / "engine-0.txt", tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH={STUBS}\nexec {sglang_python()} "$@"\n')
    script.chmod(0o700)
    settings = fleet_settings(checkpoint, claims, tmp_path, num_engines=1, restart=False, environment=SPAWNING | NO_KERNELS)
    settings = replace(settings, servers=tuple(replace(server, turn=turn, python=str(script)) for server in settings.servers))
    launching = asyncio.create_task(Fleet.launch(settings))
    async with asyncio.timeout(200):
        while fuligo_turns.WAITING not in (log.read_text() if log.exists() else ""):  # noqa: ASYNC110  # a file can only be polled
            await asyncio.sleep(0.2)
    assert not launching.done() and "Load weight begin" not in log.read_text()
    turn.touch()
    fleet = await launching
    try:
        assert "Load weight begin" in log.read_text()
        server = fleet.servers[0]
        assert isinstance(server, SGLangServer)
        assert_started_ahead(server)
        assert (await fleet.group.generate([1, 2, 3], SamplingParams(max_new_tokens=2), rid="0", timeout_s=60)).output_ids.size
        await asyncio.sleep(SEEN_S)
        os.kill(next(iter(descendants(server.pid))), signal.SIGKILL)
        with pytest.raises(EngineError, match=r"engine 0 was killed \(.*engine-0\.txt"):
            await asyncio.wait_for(fleet.watch(), 120)
    finally:
        await fleet.stop()


async def test_an_engine_that_ends_before_its_turn_ends_the_launch(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> None:
    settings = fleet_settings(checkpoint, claims, tmp_path, num_engines=1)
    [server] = settings.servers
    broken = replace(server, turn=tmp_path / "turn", arguments={**server.arguments, "no_such_flag": 1})
    with pytest.raises(EngineError, match="no-such-flag"):
        await Fleet.launch(replace(settings, servers=(broken,)))


def test_schedulers_wait_and_the_main_process_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = tmp_path / "turn"
    monkeypatch.setenv(TURN_VARIABLE, str(turn))
    fuligo_turns.wait()
    scheduler = multiprocessing.get_context("spawn").Process(target=fuligo_turns.wait)
    scheduler.start()
    scheduler.join(2 * fuligo_turns.POLL_S)
    assert scheduler.is_alive()
    turn.touch()
    scheduler.join(60)
    assert scheduler.exitcode == 0


@pytest.mark.parametrize(("plugin", "imported"), [(None, [fuligo_turns.MODELS]), ("mine", [])])
def test_models_are_not_imported_before_a_plugin_that_may_replace_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str | None, imported: list[str]
) -> None:
    """Otherwise it would depend on the trainer's speed whether the user's plugin has an effect."""
    if plugin is not None:
        info = tmp_path / f"{plugin}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = {plugin}:install\n")
    for directory in (tmp_path, TURN_PLUGIN, SYNC_PLUGIN):
        monkeypatch.syspath_prepend(directory)
    turn, found = tmp_path / "turn", list[str]()
    monkeypatch.setenv(TURN_VARIABLE, str(turn))

    def is_alive() -> bool:
        turn.touch()
        return True

    monkeypatch.setattr(fuligo_turns.multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=is_alive))
    monkeypatch.setattr(fuligo_turns.importlib, "import_module", found.append)
    fuligo_turns.wait()
    assert found == imported


STARTS_A_SCHEDULER = """
import multiprocessing, time, fuligo_turns
scheduler = multiprocessing.get_context("spawn").Process(target=fuligo_turns.wait)
scheduler.start()
time.sleep(600)
"""


def test_a_scheduler_ends_with_its_main_process(tmp_path: Path) -> None:
    """Also if nothing else ends it, because the driver and the engine's guard were killed as well."""
    variables = {**os.environ, "PYTHONPATH": str(TURN_PLUGIN), TURN_VARIABLE: str(tmp_path / "turn")}
    command = [sys.executable, "-c", STARTS_A_SCHEDULER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables) as main:
        assert main.stdout is not None
        assert main.stdout.readline().strip() == fuligo_turns.WAITING
        main.kill()
        assert main.communicate(timeout=60) == ("", None), "the scheduler closes its output when it ends"


def test_the_plugin_is_among_those_that_the_user_chose(tmp_path: Path, claims: PortClaims) -> None:
    """SGLang loads no plugins but those in SGLANG_PLUGINS, if it is set."""
    given = {"environment": {"SGLANG_PLUGINS": "mine"}, "turn": tmp_path / "turn", "is_exact": True}
    found = server_settings("engine 0", tmp_path, claims, tmp_path / "log", **given).full_environment()
    assert found["SGLANG_PLUGINS"] == "mine,fuligo_sync,fuligo_exact,fuligo_turns"
    assert (
        "SGLANG_PLUGINS" not in server_settings("engine 0", tmp_path, claims, tmp_path / "log", turn=tmp_path / "turn").full_environment()
    )
