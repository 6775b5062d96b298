"""A run on an external engine: it receives the weights, and it is all that is left after the run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuligo.engines.client import EngineClient
from fuligo.engines.embedded.launch import EmbeddedEngineProcess, EmbeddedEngineSettings, launch_embedded
from tests.e2e.command import fail
from tests.e2e.conftest import Job, Start
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.records import metrics
from tests.e2e.warm_children import ForkServer


@pytest.fixture(scope="module")
def engine(checkpoint: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngineProcess]:
    log_file = tmp_path_factory.mktemp("engine") / "engine.txt"
    settings = EmbeddedEngineSettings(str(checkpoint), log_file, device="cpu", num_threads=1)
    with asyncio.Runner() as runner:
        with fork_server.serving():
            engine = runner.run(launch_embedded(settings))
        yield engine
        runner.run(engine.stop())


def weight_version(engine: EmbeddedEngineProcess) -> int:
    async def ask() -> int:
        client = EngineClient(engine.url, engine.keys)
        try:
            return (await client.model_info()).weight_version
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("transport", ["tensor", pytest.param("disk", marks=pytest.mark.slow)])  # test_modes.py sends by disk
def test_nothing_stays_but_the_engine(
    transport: str, engine: EmbeddedEngineProcess, job: Job, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, key in engine.keys.environment.items():
        monkeypatch.setenv(name, key)
    changes = {"embedded_num_threads": None, "rollout_external_engine_addrs": [engine.url.removeprefix("http://")]}
    process = start(*job(**changes, num_rollout=10, update_weight_transport=transport, run_dir=tmp_path / "run"), warm=True)
    wait_until(lambda: len(metrics(tmp_path / "run")) >= 2 or process.poll() is not None, "two steps are recorded")
    family = descendants(process.pid)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    wait_until(lambda: not alive(family), "all processes of the run have ended", timeout_s=120)
    assert weight_version(engine) == 10


def test_without_the_engines_key_the_run_ends_and_says_how_to_give_it(engine: EmbeddedEngineProcess, job: Job, tmp_path: Path) -> None:
    before = weight_version(engine)
    changes = {"embedded_num_threads": None, "rollout_external_engine_addrs": [engine.url.removeprefix("http://")]}
    error = fail(1, *job(**changes, num_rollout=1, run_dir=tmp_path / "run"), FULIGO_ENGINE_KEY="another key")
    assert "the key is missing or wrong" in error
    assert "FULIGO_ENGINE_KEY" in error
    assert weight_version(engine) == before


def test_syncs_of_only_changes_are_refused(engine: EmbeddedEngineProcess, job: Job, tmp_path: Path) -> None:
    before = weight_version(engine)
    changes = {"embedded_num_threads": None, "rollout_external_engine_addrs": [engine.url.removeprefix("http://")]}
    flags = job(**changes, num_rollout=1, update_weight_mode="delta", run_dir=tmp_path / "run")
    error = fail(2, *flags, **engine.keys.environment)
    assert "--update-weight-mode delta leaves unchanged tensors out" in error and "fuligo serve" in error
    assert weight_version(engine) == before
