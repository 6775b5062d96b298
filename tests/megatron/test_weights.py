"""A checkpoint goes into a model of any layout and comes out as it was, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fuligo.models.registry import names_of, read_config_json
from fuligo.trainer.megatron_backend.layout import Layout
from fuligo.trainer.ranks.world import World
from fuligo.weights.checksum import WeightsChecksum
from tests import tiny
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"vocab_size": 397},
    "glm4": {},
}


def save_published(directory: Path, family: str) -> Path:
    """A tiny checkpoint in bf16, as `save_pretrained` writes it."""
    tiny.model(family, layers=4, **SHAPES[family]).bfloat16().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_published(tmp_path_factory.mktemp(family), family)
        return made[family]

    return checkpoint


def load_and_export(world: World, settings: Any, gather_bytes: int) -> tuple[str, list[tuple[str, Tensor]]]:
    """The checksum of what comes out, and on rank 0 all of it."""
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.weights.export import named_weights
    from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    from fuligo.trainer.megatron_backend.world import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    chunks = build_chunks(settings, trained=True)
    load_hugging_face(chunks, settings.initial_weights)
    names = names_of(read_config_json(settings.initial_weights))
    checksum, exported = WeightsChecksum(), []
    for name, tensor in named_weights(chunks, names, dtype=torch.bfloat16, gather_bytes=gather_bytes):
        checksum.update(name, tensor)
        exported.append((name, tensor.detach().clone()))
    return checksum.result().checksum, exported if world.rank == 0 else []


def assert_comes_back(pool: RankPool, directory: Path, layout: Layout, *, gather_bytes: int = 2**26, **overrides: Any) -> None:
    settings = settings_of(directory, layout, **overrides)
    results = pool.run(layout.num_ranks, load_and_export, settings, gather_bytes)
    assert len({checksum for checksum, _ in results}) == 1
    exported, stored = results[0][1], load_file(directory / "model.safetensors")
    assert len(exported) == len(stored)
    for name, tensor in exported:
        torch.testing.assert_close(tensor, stored[name].to(tensor.dtype), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", Layout()),
        ("llama", Layout(tp=2, num_ranks=2)),
        ("qwen3", Layout(tp=4, num_ranks=4)),
        ("qwen2", Layout(tp=2, pp=2, num_ranks=4)),
        ("glm4", Layout(tp=2, pp=2, vpp=2, num_ranks=4)),
        ("qwen3", Layout(pp=3, num_layers_first_stage=1, num_layers_last_stage=1, num_ranks=3)),
    ],
    ids=str,
)
def test_a_checkpoint_comes_back_byte_for_byte(pool: RankPool, checkpoints, family: str, layout: Layout):
    assert_comes_back(pool, checkpoints(family), layout, gather_bytes=2**15)
