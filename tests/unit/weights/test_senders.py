"""Tensors sent to engines: in their format, and with --update-weight-mode delta only those that an engine lacks."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from fuligo.formats.weight_manifest import EngineAddress, EngineFormat, Transport, Undelivered, WeightManifest, WeightTarget
from fuligo.weights import senders
from fuligo.weights.senders import WeightSender

ENGINE = EngineAddress("http://host:30000")
WEIGHTS = {"a": torch.zeros(4), "b": torch.ones(4), "c": torch.full((4,), 2.0)}


@pytest.fixture
def target(tmp_path: Path) -> WeightTarget:
    return WeightTarget("disk", version=1, bucket_bytes=2**20, engines=(ENGINE,), directory=str(tmp_path), changes_only=True)


def sent(sender: WeightSender, weights: dict[str, torch.Tensor], target: WeightTarget) -> set[str]:
    """Return the names of the tensors that were sent."""
    manifest = sender.send(iter(weights.items()), target)
    names = set(load_file(Path(target.directory) / "model-00000.safetensors"))
    assert isinstance(manifest, WeightManifest) and (manifest.num_tensors, manifest.num_bytes_sent) == (3, 16 * len(names))
    return names


def test_the_same_engines_get_what_has_changed(target: WeightTarget):
    sender = WeightSender()
    assert sent(sender, WEIGHTS, target) == {"a", "b", "c"}
    assert sent(sender, WEIGHTS | {"b": torch.zeros(4)}, target) == {"b"}


@pytest.mark.parametrize(
    "engines", [(replace(ENGINE, start=1),), (ENGINE, EngineAddress("http://host:30001"))], ids=["restarted", "one more"]
)
def test_other_engines_than_before_get_all_weights(engines: tuple[EngineAddress, ...], target: WeightTarget):
    sender = WeightSender()
    sent(sender, WEIGHTS, target)
    assert sent(sender, WEIGHTS, replace(target, engines=engines)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "transport, streams, unconfirmed", [("disk", False, True), ("gloo", False, True), ("gloo", True, False), ("tensor", False, False)]
)
def test_a_manifest_names_engines_that_answer_for_their_first_rank_only(
    target: WeightTarget, monkeypatch: pytest.MonkeyPatch, transport: Transport, streams: bool, unconfirmed: bool
):
    engines = (ENGINE, EngineAddress("http://host:30001", num_ranks=2))
    sender = WeightSender()
    sender._group = cast(Any, SimpleNamespace(streams=streams, engines=engines, broadcast=lambda *_, is_last: None))
    monkeypatch.setattr(senders, "_share", lambda *_: None)
    manifest = sender.send(iter(WEIGHTS.items()), replace(target, transport=transport, engines=engines))
    assert isinstance(manifest, WeightManifest) and manifest.unconfirmed == ((engines[1].url,) if unconfirmed else ())


def test_a_failed_send_makes_the_next_one_complete(target: WeightTarget):
    sender = WeightSender()
    sent(sender, WEIGHTS, target)

    def interrupted():
        yield "a", torch.ones(4)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        sender.send(interrupted(), target)
    assert sent(sender, WEIGHTS | {"a": torch.ones(4)}, target) == {"a", "b", "c"}


def test_a_send_that_an_engine_refused_makes_the_next_one_complete(target: WeightTarget):
    target = replace(target, engines=(EngineAddress("http://127.0.0.1:9"),))
    sender = WeightSender()
    sent(sender, WEIGHTS, target)
    undelivered = sender.send(iter(WEIGHTS.items()), replace(target, transport="tensor"))
    assert isinstance(undelivered, Undelivered) and "http://127.0.0.1:9" in undelivered.reason
    assert sent(sender, WEIGHTS, target) == {"a", "b", "c"}


def test_after_a_send_that_an_engine_did_not_take_its_weights_are_freed_at_once(target: WeightTarget):
    """Memory is freed at once, not at Python's next collection: a bucket takes gigabytes of a GPU that trains next."""
    gathered: list[weakref.ref[torch.Tensor]] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name in WEIGHTS:
            weight = torch.zeros(4)
            gathered.append(weakref.ref(weight))
            yield name, weight

    target = replace(target, transport="tensor", engines=(EngineAddress("http://127.0.0.1:9"),), bucket_bytes=16)
    gc.disable()
    try:
        assert isinstance(WeightSender().send(gather(), target), Undelivered)
        assert [weight() for weight in gathered] == [None] * 3
    finally:
        gc.enable()


def test_an_engine_that_nothing_leads_to_took_nothing(target: WeightTarget):
    """The send fails as if the machine and its network were lost."""
    target = replace(target, transport="gloo", engines=(EngineAddress("http://255.255.255.255:30000"),))
    undelivered = WeightSender().send(iter(WEIGHTS.items()), target)
    assert isinstance(undelivered, Undelivered)
    assert undelivered.reason.startswith("cannot reach one of the engines http://255.255.255.255:30000 from this machine: ")


def test_engines_get_each_expert_by_itself_and_nothing_that_they_have_no_use_for(target: WeightTarget):
    down = torch.randn(2, 3, 4)
    weights = {
        "model.layers.0.mlp.experts.down_proj": down,
        "model.layers.1.norm.weight": torch.ones(3),
        "model.layers.10.b": torch.ones(3),
    }
    sender = WeightSender(EngineFormat(left_out=("model.layers.1.",)))
    manifest = sender.send(iter(weights.items()), replace(target, changes_only=False))
    held = load_file(Path(target.directory) / "model-00000.safetensors")
    assert sorted(held) == [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(2)] + ["model.layers.10.b"]
    assert all(torch.equal(held[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"], down[expert]) for expert in range(2))
    assert isinstance(manifest, WeightManifest) and manifest.num_tensors == 3
