"""A real `fuligo serve` process, tested over HTTP."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch

from fuligo.cli import serve
from fuligo.engines.client import EngineClient
from fuligo.engines.embedded.launch import EmbeddedEngineProcess, EmbeddedEngineSettings, launch_embedded
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.serve import _serve as serve_model
from fuligo.engines.generation import EngineLoad, SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.http_access import Strangers
from fuligo.errors import ConfigError, EngineError, WeightSyncError
from fuligo.formats.payload import shared_payload
from fuligo.formats.weight_manifest import WeightManifest, WeightTarget, weights_checksum
from fuligo.limits import raise_open_files
from fuligo.weights.senders import WeightSender
from fuligo.weights.sync import WeightSync, WeightSyncSettings
from tests import tiny
from tests.e2e.processes import interrupt
from tests.e2e.warm_children import ForkServer

START_TIMEOUT_S = 120


def settings(checkpoint: Path, directory: Path) -> EmbeddedEngineSettings:
    return EmbeddedEngineSettings(
        str(checkpoint), directory / "engine.log", device="cpu", num_threads=1, max_total_tokens=65536, start_timeout_s=START_TIMEOUT_S
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(
    checkpoint: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EmbeddedEngineProcess]:
    with fork_server.serving():
        engine = await launch_embedded(settings(checkpoint, tmp_path_factory.mktemp("engine")))
    yield engine
    await engine.stop()
    assert not engine.process.alive


@pytest.fixture
async def group(process: EmbeddedEngineProcess) -> AsyncIterator[EngineGroup]:
    group = EngineGroup.connect([process.url], keys=process.keys, retries=0, timeout_s=60)
    yield group
    await group.close()


async def until(engine: EngineClient | EngineGroup, condition: Callable[[EngineLoad], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition(await engine.load()):  # noqa: ASYNC110  # the engine is asked as a client would
            await asyncio.sleep(0.002)


async def test_a_wave_that_is_taken_in_during_a_pause_is_reproduced_bit_for_bit(group: EngineGroup) -> None:
    async def wave(name: str) -> list[tuple[list[int], list[float]]]:
        before = (await group.load()).num_arrived or 0
        await group.pause("in_place")
        requests = [
            asyncio.create_task(
                group.generate(
                    [5, 6, number % 4], SamplingParams(4 + number, sampling_seed=number), rid=f"{name}{number}", priority=-number
                )
            )
            for number in range(40)
        ]
        await until(group, lambda load: load.num_arrived == before + 40)
        await group.resume()
        return [(answer.output_ids.tolist(), answer.logprobs.tolist()) for answer in await asyncio.gather(*requests)]

    assert await wave("a") == await wave("b")


async def test_new_weights_over_shared_memory(group: EngineGroup) -> None:
    newer = list(tiny.model(seed=1).named_parameters())
    await group.pause("abort")
    with shared_payload(newer) as payload:
        await group.clients[0].update_weights_from_tensor([payload], version=5)
    await group.resume()
    ((url, info),) = await group.model_infos()
    ((_, digest),) = await group.weights_checksums()
    assert (url, info.weight_version) == (group.urls[0], 5)
    assert digest == weights_checksum(newer)
    assert (await group.generate([5], SamplingParams(2), rid="after")).weight_version == 5


async def test_control_calls(group: EngineGroup) -> None:
    waiting = asyncio.create_task(group.generate([5], SamplingParams(500, ignore_eos=True), rid="w"))
    await until(group, lambda load: load.num_running == 1)
    await group.abort_all()
    assert (await waiting).finish_reason == "abort"
    await group.clients[0].flush_cache()
    await group.release_memory()
    await group.resume_memory()
    with pytest.raises(EngineError, match="context of 1024"):
        await group.generate([5], SamplingParams(5000), rid="too long")


async def test_a_server_that_cannot_listen_says_so(checkpoint: Path, tmp_path: Path) -> None:
    """The process ends instead of never answering."""
    listener = socket.socket()
    listener.close()
    given = EmbeddedEngineSettings(str(checkpoint), max_total_tokens=1024, ready_file=tmp_path / "ready.json")
    with pytest.raises(OSError, match="Bad file descriptor"):
        async with asyncio.timeout(120):
            await serve_model(given, [EngineModel(str(checkpoint), torch.device("cpu"), torch.float32)], listener)
    assert not (tmp_path / "ready.json").exists()


@pytest.mark.long
@pytest.mark.usefixtures("warm_children")
async def test_sigterm_answers_waiting_requests_and_ends_cleanly(checkpoint: Path, tmp_path: Path) -> None:
    """The process runs in the background, where Ctrl-C does not reach it."""
    with interrupt(ignored=True):
        engine = await launch_embedded(settings(checkpoint, tmp_path))
    client = EngineClient(engine.url, engine.keys, retries=0)
    os.kill(engine.process.pid, signal.SIGINT)
    await client.pause("in_place")
    waiting = asyncio.create_task(client.generate([5], SamplingParams(500), rid="w"))
    await until(client, lambda load: load.num_waiting == 1)
    await engine.stop()
    assert (await waiting).finish_reason == "abort"
    assert engine.process._process.returncode == 0
    await client.close()


@pytest.mark.long
@pytest.mark.slow  # tests/e2e/test_interrupts.py kills a run, whose engine ends in the same way
async def test_nothing_is_left_when_the_parent_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    parent = f"""
import asyncio, sys, time
from pathlib import Path
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, launch_embedded
settings = EmbeddedEngineSettings({str(checkpoint)!r}, Path({str(tmp_path)!r}) / "log", device="cpu", num_threads=1)
engine = asyncio.run(launch_embedded(settings))
print(engine.process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert process.stdout is not None
    engine_pid = int(await asyncio.to_thread(process.stdout.readline))
    os.kill(engine_pid, 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{engine_pid}").exists() and "Z (zombie)" not in Path(f"/proc/{engine_pid}/status").read_text():  # noqa: ASYNC240
        assert time.monotonic() < deadline, "the engine outlived its parent"
        await asyncio.sleep(0.05)


async def test_an_engine_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"exit code 2.*(?s:.*)no config\.json"):
        await launch_embedded(settings(tmp_path, tmp_path))


class TestCommand:
    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no config\.json"):
            serve.main(["--model-path", str(tmp_path)])

    def test_a_checkpoint_of_a_run_names_the_directory_inside(self, tmp_path: Path) -> None:
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "config.json").touch()
        with pytest.raises(ConfigError, match=f"no config.json; use {tmp_path}/hf$"):
            serve.main(["--model-path", str(tmp_path)])

    def test_a_port_that_is_taken(self, checkpoint: Path) -> None:
        listener = serve._bind("127.0.0.1", 0)
        listener.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            serve.main(["--model-path", str(checkpoint), "--port", str(listener.getsockname()[1])])
        listener.close()

    def test_help_needs_no_torch(self) -> None:
        code = "import sys; from fuligo.cli import serve\ntry: serve.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert "--max-running-requests" in shown
        assert shown.endswith("False\n")

    @pytest.mark.parametrize(
        "arguments", [[], ["--model-path", "x", "--max-running-requests", "0"], ["--model-path", "x", "--dtype", "fp8"]]
    )
    def test_bad_arguments_exit_with_2(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            serve.main(arguments)
        assert caught.value.code == 2

    def test_the_ready_file_holds_the_port(self, process: EmbeddedEngineProcess) -> None:
        from fuligo.formats.disk import replace_text

        target = process.process.log_file.parent / "ready.json"
        replace_text(target, json.dumps({"port": 1}))
        assert json.loads(target.read_text()) == {"port": 1}


class TestAccess:
    """Requests as another user of the machine, or a page in a browser, would make them."""

    CONTROL = (
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/pause_generation",
        "/abort_request",
        "/release_memory_occupation",
    )

    @staticmethod
    async def status(process: EmbeddedEngineProcess, path: str, key: str | None, **headers: str) -> int:
        authorization = {} if key is None else {"authorization": f"Bearer {key}"}
        given = {"content-type": "application/json", **authorization, **headers}
        async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
            return (await http.post(path, content=b"{}", headers=given)).status_code

    async def test_no_key_and_wrong_keys_are_refused(self, process: EmbeddedEngineProcess, group: EngineGroup) -> None:
        before = await group.weights_checksums()
        for key in (None, "wrong", process.keys.requests):
            for path in self.CONTROL:
                assert await self.status(process, path, key) == 401, (path, key)
        for key in (None, process.keys.control):
            assert await self.status(process, "/generate", key) == 401
        async with httpx.AsyncClient(base_url=process.url) as http:
            assert (await http.get("/server_info")).status_code == 401
            assert (await http.get("/health")).status_code == 200
        assert await group.weights_checksums() == before
        assert len((await group.generate([5], SamplingParams(2, ignore_eos=True), rid="undisturbed")).output_ids) == 2

    async def test_a_foreign_page_is_refused_even_with_the_key(self, process: EmbeddedEngineProcess) -> None:
        key = process.keys.control
        assert await self.status(process, "/flush_cache", key) == 200
        assert await self.status(process, "/flush_cache", key, host="evil.example") == 403
        assert await self.status(process, "/flush_cache", key, **{"content-type": "text/plain"}) == 415

    async def test_a_request_without_a_key_is_refused_before_its_body(self, process: EmbeddedEngineProcess) -> None:
        host, port = process.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {2**50}\r\n\r\n".encode())
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()

    async def test_connections_without_a_key_cannot_exhaust_the_engine(self, process: EmbeddedEngineProcess, group: EngineGroup) -> None:
        """Another user of the machine opens more connections than the engine may have files, and sends more than a header."""
        raise_open_files()
        host, port = process.url.removeprefix("http://").split(":")
        assert await group.load()
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(Strangers.max_connections + 100)]
        try:
            assert len((await group.generate([5], SamplingParams(2, ignore_eos=True), rid="beside strangers")).output_ids) == 2
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(idle[0][0].read(), 60) == b"", "the oldest gave way"
            reader, writer = idle[-1]
            writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nX: ".encode() + b"a" * 2 * Strangers.max_bytes)
            with contextlib.suppress(ConnectionError):
                assert b"200" not in await asyncio.wait_for(reader.read(), 60)
        finally:
            for _, writer in idle:
                writer.close()
        async with httpx.AsyncClient(base_url=process.url) as http:
            assert (await http.get("/health")).status_code == 200

    def test_other_users_cannot_read_the_keys(self, process: EmbeddedEngineProcess) -> None:
        command = Path(f"/proc/{process.process.pid}/cmdline").read_text()
        for key in (process.keys.requests, process.keys.control):
            assert key not in command
            assert key not in process.process.log_file.read_text()

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Iterator[list[str]]:
        """Paths to a checkpoint outside the engine's directories."""
        checkpoint = tiny.save_checkpoint(tmp_path / "elsewhere", seed=3)
        link = Path(f"/dev/shm/fuligo-test-{os.getpid()}")
        link.symlink_to(checkpoint)
        yield [str(checkpoint), f"/dev/shm/../..{checkpoint}", str(link), "someone/model-on-a-hub"]
        link.unlink()

    async def test_weights_come_only_from_directories_that_were_named(self, group: EngineGroup, elsewhere: list[str]) -> None:
        before = await group.weights_checksums()
        for path in elsewhere:
            with pytest.raises(EngineError, match=r"cannot load weights from .*--weights-from"):
                await group.clients[0].update_weights_from_disk(path, 1)
        assert await group.weights_checksums() == before

    async def test_another_users_directory_in_shared_scratch_is_refused(self, group: EngineGroup, tmp_path: Path) -> None:
        if os.getuid() != 0:
            pytest.skip("needs root to own a directory as another user")
        planted = Path(f"/dev/shm/fuligo-weights-planted-{os.getpid()}")
        tiny.save_checkpoint(planted, seed=3)
        os.chown(planted, 65534, 65534)
        try:
            with pytest.raises(EngineError, match="belongs to another user"):
                await group.clients[0].update_weights_from_disk(str(planted), 1)
        finally:
            shutil.rmtree(planted)


class Sender:
    """Trainer that sends one model's weights."""

    num_updates = 0

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        manifest = await asyncio.to_thread(WeightSender().send, tiny.model(seed=target.version).named_parameters(), target)
        assert isinstance(manifest, WeightManifest)
        return manifest


async def test_a_model_that_was_zeroed_under_the_current_version_is_noticed(group: EngineGroup) -> None:
    settings = WeightSyncSettings("tensor", 2**20, False, Path(), Path())
    weights = WeightSync(Sender(), group, settings)
    assert [await weights.sync(), await weights.sync()] == [1, 2], "the run's own updates are no alarm"
    zeros = [(name, torch.zeros_like(weight)) for name, weight in tiny.model().named_parameters()]
    await group.pause("in_place")
    with shared_payload(zeros) as payload:
        await group.clients[0].update_weights_from_tensor([payload], version=2)
    await group.resume()
    ((url, info),) = await group.model_infos()
    assert info.weight_version == 2, "nothing else tells the engine from one with the run's weights"
    with pytest.raises(WeightSyncError, match=f"engine {url} has loaded weights since version 2 that this run did not send"):
        await weights.sync()
    await group.resume()


def test_serve_prints_a_key_if_the_environment_has_none(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuligo", "serve", "--model-path", str(checkpoint), "--port", "0", "--device", "cpu"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FULIGO_ENGINE")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as engine:
        assert engine.stdout is not None
        printed = engine.stdout.readline()
        engine.kill()
    assert re.fullmatch(r"clients need this key: export FULIGO_ENGINE_KEY=[0-9a-f]{64}\n", printed)
