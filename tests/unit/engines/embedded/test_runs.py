"""Engine of several runs: each sees one of its own, over one copy of the base weights."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch

from fuligo.engines.client import EngineClient
from fuligo.engines.embedded.engine import EmbeddedEngine, EngineThread
from fuligo.engines.embedded.launch import EmbeddedEngineProcess, EmbeddedEngineSettings, launch_embedded, run_path
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.embedded.serve import _load as load
from fuligo.engines.generation import Generation, SamplingParams
from fuligo.errors import EngineError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.payload import shared_payload
from fuligo.models.adapter import adapter_tensors, base_tensors
from tests import tiny
from tests.e2e.warm_children import ForkServer

SHAPES = {"0": AdapterConfig(rank=4, alpha=8.0), "1": AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(
    checkpoint: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EmbeddedEngineProcess]:
    log_file = tmp_path_factory.mktemp("engine") / "engine.log"
    settings = EmbeddedEngineSettings(str(checkpoint), log_file, device="cpu", num_threads=1, max_total_tokens=65536, shapes_of_runs=SHAPES)
    with fork_server.serving():
        engine = await launch_embedded(settings)
    yield engine
    await engine.stop()


@pytest.fixture
async def runs(process: EmbeddedEngineProcess) -> AsyncIterator[list[EngineClient]]:
    clients = [EngineClient(process.url + run_path(name), process.keys, retries=0) for name in SHAPES]
    yield clients
    for client in clients:
        await client.close()


async def sample(engine: EngineClient, number: int = 1) -> Generation:
    return await engine.generate([5, 6, number], SamplingParams(8, sampling_seed=number, ignore_eos=True), rid=f"r{number}")


async def sync(engine: EngineClient, checkpoint: Path, name: str, version: int, scale: float) -> None:
    """Send an adapter whose B is not zero."""
    source = SHAPES[name]
    model = EngineModel(str(checkpoint), torch.device("cpu"), torch.float32, adapter=source)
    torch.manual_seed(int(name))
    tensors = [(stored, torch.randn_like(tensor) * scale) for stored, tensor in adapter_tensors(model.module).items()]
    await engine.pause("abort")
    with shared_payload(tensors) as payload:
        await engine.update_weights_from_tensor([payload], version=version)
    await engine.resume()


@pytest.mark.long
async def test_each_run_has_its_own_adapter_and_version(runs: list[EngineClient], checkpoint: Path) -> None:
    first, second = runs
    before = await sample(second)
    await sync(first, checkpoint, "0", 3, scale=0.3)
    infos = [await engine.model_info() for engine in runs]
    assert [info.weight_version for info in infos] == [3, 0]
    assert infos[0].adapter_digest != infos[1].adapter_digest
    after = await sample(second)
    assert after.output_ids.tolist() == before.output_ids.tolist() and after.logprobs.tolist() == before.logprobs.tolist()
    changed = await sample(first)
    assert changed.logprobs.tolist() != before.logprobs.tolist()
    assert (changed.weight_version, after.weight_version) == (3, 0)


async def test_one_run_s_pause_and_aborts_are_not_the_other_s(runs: list[EngineClient]) -> None:
    first, second = runs
    await first.pause("in_place")
    waiting = asyncio.create_task(sample(first, 2))
    assert (await sample(second, 2)).finish_reason == "length"
    await second.abort_all()
    assert not waiting.done()
    assert (await second.load()).num_waiting == 0
    await first.resume()
    assert (await waiting).finish_reason == "length"


async def test_a_run_samples_beside_another_as_alone(runs: list[EngineClient], checkpoint: Path) -> None:
    """Bit for bit: the batches of a run hold its requests only."""
    for name, engine in zip(SHAPES, runs, strict=True):
        await sync(engine, checkpoint, name, 7, scale=0.2)
    alone = [await sample(engine, 3) for engine in runs]
    together = await asyncio.gather(*(sample(engine, 3) for engine in runs))
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs.tolist() == other.logprobs.tolist()


async def test_only_paths_of_runs_are_served_and_only_with_the_key(process: EmbeddedEngineProcess) -> None:
    async with httpx.AsyncClient() as client:
        key = process.keys.headers("GET", "/model_info")
        assert (await client.get(f"{process.url}/model_info", headers=key)).status_code == 404
        assert (await client.get(f"{process.url}/runs/2/model_info", headers=key)).status_code == 404
        assert (await client.get(f"{process.url}/runs/1/model_info", headers=key)).status_code == 200
        assert (await client.get(f"{process.url}/runs/1/model_info")).status_code == 401


def test_the_models_of_all_runs_have_one_base(checkpoint: Path) -> None:
    first, second = (model.module for model in load(EmbeddedEngineSettings(str(checkpoint), device="cpu", shapes_of_runs=SHAPES)))
    addresses = [{name: tensor.data_ptr() for name, tensor in base_tensors(module).items()} for module in (first, second)]
    assert addresses[0] == addresses[1]
    assert len(adapter_tensors(first)) > len(adapter_tensors(second)) > 0


def test_a_failure_of_one_run_s_engine_is_not_the_others(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EngineModel(str(checkpoint), torch.device("cpu"), torch.float32)
    thread, failed = EngineThread(), []
    engines = [
        EmbeddedEngine(
            model,
            max_running_requests=4,
            max_total_tokens=4096,
            on_ended=lambda _: None,
            on_failure=lambda number=number: failed.append(number),
            thread=thread,
        )
        for number in range(2)
    ]
    monkeypatch.setattr(engines[0], "_take_in", lambda: 1 / 0)
    thread.start()
    engines[0].pause("retract")
    engines[1].pause("retract").result(60)
    assert failed == [0] and engines[1].failure is None
    with pytest.raises(EngineError, match="the engine has failed"):
        engines[0].submit(Request("r", [5, 6], SamplingParams(2), frozenset(), seed=0))
    thread.stop(10)
