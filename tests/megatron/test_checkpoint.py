"""Checkpoints of the Megatron trainer: saved under one layout and loaded under another, the next optimizer step gives the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuligo.models.names import ModelNames
from fuligo.models.registry import names_of, read_config_json
from fuligo.trainer.megatron_backend.layout import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool
from tests.tiny import save_checkpoint

NUM_STEPS = 2
"""Optimizer steps before a save."""


def train(
    world: World, settings: MegatronTrainerSettings, *, load: Path | None, save: Path | None, num_steps: int
) -> dict[str, Tensor] | None:
    """Optimizer steps from the settings' first weights or a checkpoint; the weights after them, on rank 0."""
    from fuligo.checkpoint.megatron_dist import CheckpointWriter, restore_state
    from fuligo.trainer.megatron_backend.optimizer import apply_step, gradient_norm
    from fuligo.trainer.megatron_backend.weights.export import named_weights

    state = build_state(world, settings)
    if load is not None:
        restore_state(load, state, world)
    for _ in range(num_steps):
        set_gradients(state.chunks, state.names, state.progress.num_optimizer_steps)
        norm = gradient_norm(state.optimizer)
        apply_step(state.optimizer, settings.optimizer, step=state.progress.num_optimizer_steps, grad_norm=norm)
        state.progress.num_optimizer_steps += 1
    if save is not None:
        CheckpointWriter(world).save(save, state, model_files=settings.hf_checkpoint)
    weights = {name: tensor.clone() for name, tensor in named_weights(state.chunks, state.names, dtype=torch.float32)}
    return weights if world.rank == 0 else None


def build_state(world: World, settings: MegatronTrainerSettings) -> Any:
    from fuligo.checkpoint.megatron_dist import MegatronState
    from fuligo.trainer.megatron_backend.data_parallel import wrap
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.optimizer import build_optimizer
    from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    from fuligo.trainer.megatron_backend.world import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    chunks = build_chunks(settings, trained=True)
    load_hugging_face(chunks, settings.initial_weights)
    wrapped = wrap(chunks, settings)
    names = names_of(read_config_json(settings.hf_checkpoint))
    return MegatronState(wrapped, names, build_optimizer(wrapped, settings), settings.layout, Progress())


@torch.no_grad()
def set_gradients(chunks: Sequence[Any], names: ModelNames, step: int) -> None:
    """Numbers that depend on the weight's name and the step alone, so that no layout changes them."""
    from fuligo.trainer.megatron_backend.parts import held_weights

    for held in held_weights(chunks, names):
        if not held.tensor.requires_grad:
            continue
        seed = int.from_bytes(hashlib.blake2b(f"{held.weight.megatron}/{step}".encode(), digest_size=7).digest())
        whole = torch.randn(held.weight.shape, generator=torch.Generator().manual_seed(seed))
        gradient = torch.zeros_like(held.tensor, dtype=torch.float32)
        for part in held.parts:
            place = tuple(slice(o, o + size) for o, size in zip(part.shard.offset, part.shard.data.shape, strict=True))
            values = whole[place]
            if values.numel() == gradient.numel():
                gradient.copy_(values.view_as(gradient))
            else:
                gradient.view(-1)[part.start : part.start + values.numel()] = values.reshape(-1)
        held.tensor.main_grad.copy_(gradient)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("dense") / "qwen3", "qwen3", layers=4)


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "tp2pp2": Layout(tp=2, pp=2, num_ranks=4),
}
PAIRS = [("tp2", "pp2"), ("pp2", "dp2"), ("dp2", "vpp2"), ("vpp2", "one"), ("one", "cp2"), ("cp2", "tp2pp2"), ("tp2pp2", "tp2")]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_the_next_step_is_the_same_under_another_layout(pool: RankPool, dense: Path, tmp_path: Path, saved: str, loaded: str):
    ours, theirs = settings_of(dense, LAYOUTS[saved]), settings_of(dense, LAYOUTS[loaded])
    pool.run(ours.num_ranks, train, ours, load=None, save=tmp_path, num_steps=NUM_STEPS)
    resumed = pool.run(theirs.num_ranks, train, theirs, load=tmp_path, save=None, num_steps=1)[0]
    straight = pool.run(ours.num_ranks, train, ours, load=None, save=None, num_steps=NUM_STEPS + 1)[0]
    assert resumed is not None and straight is not None and resumed.keys() == straight.keys()
    for name, tensor in straight.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
