"""Client of an SGLang engine that several runs share, against a scripted engine; tests/sglang/test_many.py has the real one."""

import asyncio
from typing import Any

import pytest

from fuligo.engines.connection import Connection, ControlDeadlines, Deadline, Overdue
from fuligo.engines.generation import SamplingParams
from fuligo.engines.shared_client import RunRequests, SharedEngineClient
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import NO_KEYS
from fuligo.formats.weight_manifest import AdapterPayload


class ScriptedEngine(Connection):
    """Engine that keeps adapters by name, and answers a request when it is aborted or `finish` is called."""

    def __init__(self) -> None:
        super().__init__("http://engine", NO_KEYS)
        self.adapters: list[str] = ["base"]
        self.running: dict[str, asyncio.Future[str]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.ignores_aborts = False

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        body = body or {}
        match path:
            case "/generate":
                self.bodies.append(body)
                self.running[body["rid"]] = ended = asyncio.get_running_loop().create_future()
                reason = await ended
                meta = {
                    "finish_reason": {"type": reason},
                    "prompt_tokens": 1,
                    "output_token_logprobs": [(-1.0, 5, None)],
                    "weight_version": "0@0",
                }
                return {"output_ids": [5], "meta_info": meta, "text": ""}
            case "/abort_request":
                if not self.ignores_aborts:
                    self.finish(body["rid"], "abort")
            case "/v1/models":
                return {"data": [{"id": name} for name in self.adapters]}
            case "/unload_lora_adapter":
                self.adapters.remove(body["lora_name"])
            case "/load_lora_adapter_from_tensors":
                self.adapters.append(body["lora_name"])
            case "/model_info":
                return {"model_path": "model", "weight_version": "0@0"}
        return {"success": True}

    def finish(self, rid: str, reason: str = "length") -> None:
        if (ended := self.running.pop(rid, None)) is not None and not ended.done():
            ended.set_result(reason)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def client_of(engine: ScriptedEngine, run: str, requests: RunRequests | None = None) -> SharedEngineClient:
    deadlines = ControlDeadlines(step=Deadline(0.5))
    client = SharedEngineClient("http://engine", requests or RunRequests(run), retries=0, deadlines=deadlines)
    client._connection = engine
    return client


def adapter(digest: str) -> AdapterPayload:
    tensors, computed = (asyncio.get_running_loop().create_future() for _ in range(2))
    tensors.set_result("tensors")
    computed.set_result(digest)
    return AdapterPayload({}, tensors, computed)


async def sync(client: SharedEngineClient, version: int) -> None:
    await client.pause("abort")
    await client.load_adapter(adapter(f"d{version}"), version)
    await client.model_info()
    await client.resume()


def generate(client: SharedEngineClient, rid: str) -> asyncio.Task:
    return asyncio.create_task(client.generate([1], SamplingParams(4), rid=rid))


async def until_running(engine: ScriptedEngine, *rids: str) -> None:
    async with asyncio.timeout(10):
        while set(rids) != set(engine.running):  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["base", "2/x#d", "2/3", "org/model", "a/b/3#d", "2/3#"])
async def test_adapters_with_other_names_do_not_count(engine: ScriptedEngine, name: str) -> None:
    client = client_of(engine, "2")
    await sync(client, 40)
    engine.adapters.append(name)
    info = await client.model_info()
    assert (info.weight_version, info.adapter_digest) == (40, "d40")


async def test_a_sync_replaces_the_adapter_of_its_run_only(engine: ScriptedEngine) -> None:
    first, second = client_of(engine, "0"), client_of(engine, "1")
    for client, version in ((first, 0), (second, 0), (first, 1)):
        await sync(client, version)
    assert engine.adapters == ["base", "1/0#d0", "0/1#d1"]
    infos = [await client.model_info() for client in (first, second)]
    assert [(info.weight_version, info.adapter_digest) for info in infos] == [(1, "d1"), (0, "d0")]


async def test_requests_name_the_adapter_and_answers_have_its_version(engine: ScriptedEngine) -> None:
    client = client_of(engine, "1")
    with pytest.raises(EngineError, match="cannot send request early: run 1 has not synced an adapter yet"):
        await client.generate([1], SamplingParams(4), rid="early")
    await sync(client, 7)
    answer = generate(client, "r")
    await until_running(engine, "1/r")
    assert engine.bodies[0]["lora_path"] == "1/7#d7"
    engine.finish("1/r")
    assert (await answer).weight_version == 7


async def test_a_pause_ends_the_requests_of_its_run_and_holds_new_ones_back(engine: ScriptedEngine) -> None:
    """Also those of another client of the run, as the router's are."""
    requests = RunRequests("0")
    control, router, other = client_of(engine, "0", requests), client_of(engine, "0", requests), client_of(engine, "1")
    await sync(control, 1)
    await sync(other, 1)
    first, theirs = generate(router, "r"), generate(other, "r")
    await until_running(engine, "0/r", "1/r")
    await control.pause("abort")
    assert (await first).finish_reason == "abort"
    held = generate(router, "s")
    await asyncio.sleep(0.05)
    assert set(engine.running) == {"1/r"}
    await control.load_adapter(adapter("d2"), 2)
    await control.model_info()
    await control.resume()
    await until_running(engine, "1/r", "0/s")
    for rid in ("1/r", "0/s"):
        engine.finish(rid)
    assert (await held).weight_version == 2 and (await theirs).weight_version == 1


async def test_a_request_that_does_not_end_is_an_error(engine: ScriptedEngine) -> None:
    client = client_of(engine, "0")
    await sync(client, 1)
    engine.ignores_aborts = True
    answer = generate(client, "r")
    await until_running(engine, "0/r")
    with pytest.raises(Overdue, match=r"1 request did not end within 0\.5 s of the abort"):
        await client.pause("abort")
    assert client.is_overdue
    engine.finish("0/r")
    await answer


async def test_two_adapters_of_one_run_are_an_error(engine: ScriptedEngine) -> None:
    engine.adapters += ["0/1#d1", "0/2#d2"]
    with pytest.raises(EngineError, match="holds 2 adapters of run 0"):
        await client_of(engine, "0").model_info()
