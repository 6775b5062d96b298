"""Engines and router do nothing for a process without their keys."""

import base64
import json
import os
import pickle
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.sglang import server as server_module
from fuligo.engines.sglang.fleet import Fleet
from fuligo.engines.sglang.server import SGLangServer
from fuligo.errors import EngineError
from tests.e2e.processes import descendants
from tests.sglang.conftest import KEYS
from tests.sglang.oracle import PROMPTS

CONTROL = (
    "update_weights_from_tensor",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "load_lora_adapter",
    "load_lora_adapter_from_tensors",
    "update_weight_version",
    "pause_generation",
    "continue_generation",
    "abort_request",
    "flush_cache",
    "release_memory_occupation",
    "set_internal_state",
    "weights_checker",
)
REQUESTS = ("generate", "v1/chat/completions", "open_session")


class Trap:
    """Pickle that leaves a file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def status(url: str, path: str, key: str | None = None, body: object = None) -> int:
    """Return the status of a POST as a stranger makes it."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    call = urllib.request.Request(f"{url}/{path}", json.dumps(body or {}).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(call, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


async def test_engines_refuse_strangers_without_effect(running: Fleet, engines: EngineGroup, tmp_path: Path) -> None:
    before = await engines.model_infos()
    trap = tmp_path / "ran"
    update = {
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(Trap(trap))).decode()],
        "load_format": None,
        "weight_version": "99",
    }
    for url in engines.urls:
        for key in (None, "wrong", KEYS.requests):
            assert {path: status(url, path, key, update) for path in CONTROL} == dict.fromkeys(CONTROL, 401), key
        for key in (None, "wrong", KEYS.control):
            assert {path: status(url, path, key, update) for path in REQUESTS} == dict.fromkeys(REQUESTS, 401), key
    assert not trap.exists()
    assert await engines.model_infos() == before
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    assert len((await engines.clients[0].generate(PROMPTS[0], params, rid="undisturbed")).output_ids) == 2


async def test_the_router_refuses_strangers_without_effect(running: Fleet) -> None:
    url, before = running.router.url, await running.router.workers()
    for key in (None, "wrong"):
        assert status(url, "workers", key, {"url": "http://127.0.0.1:9"}) == 401
        assert status(url, "generate", key, {"input_ids": [1], "sampling_params": {}}) == 401
        assert status(url, "flush_cache", key) == 401
    assert await running.router.workers() == before


def test_nobody_else_can_read_the_keys(running: Fleet) -> None:
    """Other users can read command lines and perhaps logs; holders of the request key get `/server_info`."""
    family = descendants(os.getpid())
    commands = {pid: command for pid, command in family.items() if "sglang" in command}
    assert commands
    logs = [running.servers[0].settings.log_file, *running.servers[0].settings.log_file.parent.glob("*.txt")]
    secrets = (KEYS.requests, KEYS.control)
    assert not [command for command in commands.values() if any(key in command for key in secrets)]
    assert not [log for log in logs if any(key in log.read_text() for key in secrets)]
    call = urllib.request.Request(f"{running.servers[0].url}/server_info", headers={"Authorization": f"Bearer {KEYS.requests}"})
    with urllib.request.urlopen(call, timeout=30) as answer:
        told = answer.read().decode()
    assert '"tp_size":1' in told.replace(" ", "")
    assert not any(key in told for key in secrets)


async def test_an_engine_that_answers_everybody_is_not_used(running: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    server = running.servers[0]
    assert isinstance(server, SGLangServer)
    await server.settings.require_key()

    async def answer(_: object) -> None:
        return None

    monkeypatch.setattr(server_module.EngineClient, "model_info", answer)
    with pytest.raises(EngineError, match=r"cannot use engine 0 .*: it accepts requests without its key"):
        await server.settings.require_key()
