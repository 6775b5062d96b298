"""Syncs of only the adapter: an engine gets the base weights once, and again after a restart."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fuligo.formats.weight_manifest import EngineAddress, MergeRounding, WeightManifest, WeightTarget
from fuligo.trainer.adapter_sender import AdapterSender
from fuligo.trainer.ranks.world import World
from fuligo.weights.senders import WeightSender

FIRST, SECOND = (EngineAddress(f"http://host:{port}") for port in (30000, 30001))
RESTARTED = replace(FIRST, start=1)


@dataclass(slots=True, frozen=True)
class Policy:
    def base(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.ones(4)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        yield "base_model.model.lora_A.weight", torch.ones(2)

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("the adapter is sent by itself")

    rounding = MergeRounding()


def sends_base(sender: AdapterSender, directory: Path, *engines: EngineAddress) -> bool:
    """Sync; return whether the base weights were sent as well."""
    directory.mkdir()
    manifest = sender.send(WeightTarget("disk", version=1, bucket_bytes=2**20, engines=engines, directory=str(directory)))
    assert isinstance(manifest, WeightManifest) and manifest.adapter is not None
    return "weight" in load_file(directory / "model-00000.safetensors")


def test_engines_have_the_base_until_they_restart(tmp_path: Path) -> None:
    sender = AdapterSender(Policy(), WeightSender(), World(), merges=False)
    syncs = [
        ((FIRST, SECOND), True),
        ((FIRST, SECOND), False),
        ((RESTARTED,), True),  # by itself, when it is back
        ((RESTARTED, SECOND), False),
        ((SECOND,), False),
        ((RESTARTED, SECOND), False),
        ((FIRST,), True),
    ]
    assert [sends_base(sender, tmp_path / str(number), *engines) for number, (engines, _) in enumerate(syncs)] == [
        base for _, base in syncs
    ]
