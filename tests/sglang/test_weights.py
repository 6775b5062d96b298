"""Every transport brings all weights to every engine: afterwards the engines agree with transformers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fuligo.engines.engine import PauseMode
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import listening_store
from fuligo.errors import EngineError
from fuligo.formats.weight_manifest import EngineAddress, Transport, Undelivered, WeightManifest, WeightTarget
from fuligo.weights.senders import WeightSender
from tests.sglang import oracle
from tests.sglang.conftest import KEYS

BUCKET_BYTES = 40_000
"""Size that gives several buckets, with some tensors larger than one."""


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender()
    yield sender
    sender.close()


async def sync(
    sender: WeightSender,
    engines: EngineGroup,
    model: PreTrainedModel,
    transport: Transport,
    version: int,
    directory: Path,
    *,
    changes_only: bool = False,
    pause: PauseMode = "abort",
) -> WeightManifest:
    """Sync the weights as `WeightSync` does; the sender runs in a thread, as in the trainer."""
    target = WeightTarget(
        transport,
        version,
        BUCKET_BYTES,
        engines=tuple(EngineAddress(url, keys=KEYS) for url in engines.urls),
        directory=str(directory),
        changes_only=changes_only,
    )
    await engines.pause(pause)
    manifest = await asyncio.to_thread(sender.send, list(model.named_parameters()), target)
    if transport == "disk":
        await engines.update_weights_from_disk(str(directory), version=version)
    await engines.resume()
    return manifest


async def assert_engines_hold(engines: EngineGroup, model: PreTrainedModel, version: int) -> None:
    for engine in engines.clients:
        assert (await engine.model_info()).weight_version == version
        generations = await oracle.sample(engine)
        assert oracle.largest_difference(model, generations) < oracle.TOLERANCE, engine.url
        assert {generation.weight_version for generation in generations} == {version}


@pytest.mark.parametrize("transport", ["tensor", "gloo", "disk"])
async def test_each_transport(sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path, transport: Transport) -> None:
    model = oracle.load(checkpoint)
    for version in (11, 12):
        directory = tmp_path / str(version)
        copytree(checkpoint, directory, ignore=ignore_patterns("*.safetensors"))
        oracle.perturbed(model, seed=version)
        manifest = await sync(sender, engines, model, transport, version, directory)
        assert manifest.num_bytes == manifest.num_bytes_sent == sum(parameter.nbytes for parameter in model.parameters())
        await assert_engines_hold(engines, model, version)


async def test_engines_without_the_plugin_receive_each_bucket_by_a_call(
    sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines of this run have it: they receive all buckets in one call."""
    model = oracle.perturbed(oracle.load(checkpoint), seed=15)
    await sync(sender, engines, model, "gloo", 15, tmp_path)
    assert sender._group is not None and sender._group.streams
    monkeypatch.setattr(sender._group, "streams", False)
    oracle.perturbed(model, seed=16)
    await sync(sender, engines, model, "gloo", 16, tmp_path)
    await assert_engines_hold(engines, model, 16)


async def test_sglang_without_the_hook_refuses_a_stream(
    sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would load nothing, and report the new version."""
    await sync(sender, engines, oracle.load(checkpoint), "gloo", 13, tmp_path)
    assert sender._group is not None
    engine = engines.clients[0]
    call = engine._call

    async def unknown(path: str, body: dict[str, Any], **how: Any) -> Any:
        return await call(path, {**body, "load_format": None}, **how)

    with monkeypatch.context() as patch, pytest.raises(EngineError, match="fuligo_sync"):
        patch.setattr(engine, "_call", unknown)
        await engine.receive_weight_stream(stream=0, group_name=sender._group.name, version=14)
    assert (await engine.model_info()).weight_version == 13


async def test_an_engine_that_cannot_load_a_stream_says_why(
    sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path
) -> None:
    """It takes the next sync, although it received a part of this one."""
    model = oracle.perturbed(oracle.load(checkpoint), seed=17)
    wrong = WeightTarget("gloo", 17, BUCKET_BYTES, tuple(EngineAddress(url, keys=KEYS) for url in engines.urls))
    await engines.pause("abort")
    weights = [(name, weight[:-1] if name.endswith("1.mlp.down_proj.weight") else weight) for name, weight in model.named_parameters()]
    refused = await asyncio.to_thread(sender.send, weights, wrong)
    assert isinstance(refused, Undelivered) and "cannot load the stream of weights" in refused.reason
    await sync(sender, engines, model, "gloo", 18, tmp_path)
    await assert_engines_hold(engines, model, 18)


@pytest.mark.timeout(600)
async def test_an_engine_told_to_join_a_closed_group_refuses_and_joins_the_next_one(
    sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path
) -> None:
    """Without the plugin's check, SGLang's scheduler would retry the closed store for 30 minutes."""
    store = listening_store("127.0.0.1")
    port = store.port
    del store
    with pytest.raises(EngineError, match="its sender does not listen"):
        await engines.clients[0].init_weights_update_group(
            host="127.0.0.1", port=port, rank_offset=1, world_size=3, group_name="given-up", backend="gloo"
        )
    model = oracle.perturbed(oracle.load(checkpoint), seed=19)
    await sync(sender, engines, model, "gloo", 19, tmp_path)
    await assert_engines_hold(engines, model, 19)


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_only_changes_are_sent(
    sender: WeightSender, engines: EngineGroup, checkpoint: Path, tmp_path: Path, transport: Transport
) -> None:
    model = oracle.perturbed(oracle.load(checkpoint), seed=20)
    first = await sync(sender, engines, model, transport, 20, tmp_path, changes_only=True)
    assert first.num_bytes_sent == first.num_bytes

    changed = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        changed.add_(0.05)
    second = await sync(sender, engines, model, transport, 21, tmp_path, changes_only=True)
    assert second.num_bytes_sent == changed.nbytes
    await assert_engines_hold(engines, model, 21)

    nothing = await sync(sender, engines, model, transport, 22, tmp_path, changes_only=True)
    assert 0 < nothing.num_bytes_sent < nothing.num_bytes  # one tensor carries the version
    await assert_engines_hold(engines, model, 22)


async def test_an_engine_that_was_restarted_gets_everything(sender: WeightSender, engines: EngineGroup, checkpoint: Path) -> None:
    """Only changes are sent to an engine that has the rest; a restarted engine does not have it."""
    model = oracle.perturbed(oracle.load(checkpoint), seed=30)
    first, again = (
        WeightTarget(
            "tensor", 30 + start, BUCKET_BYTES, tuple(EngineAddress(url, start=start, keys=KEYS) for url in engines.urls), changes_only=True
        )
        for start in (0, 1)
    )
    for target in (first, again):
        manifest = await asyncio.to_thread(sender.send, list(model.named_parameters()), target)
        assert manifest.num_bytes_sent == manifest.num_bytes
    await assert_engines_hold(engines, model, 31)
