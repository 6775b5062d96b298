"""Mixtures of experts on Megatron-Core: gradients against transformers for families, dispatchers and layouts; what balances the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fuligo.trainer.megatron_backend.layout import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, OptimizerPlace
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.types import TrainBatch
from tests import train_batches
from tests.megatron.checkpoints import save_uneven
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients, torch_gradients
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)]
"""(prompt, response)"""
CAPACITY = Capacity(max_tokens=34)
LOSS = LossSettings(loss_type="sft_loss")

LAYOUTS = {
    "one": Layout(),
    "ep2": Layout(ep=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "tp2 sp etp2": Layout(tp=2, etp=2, sequence_parallel=True, num_ranks=2),
    "tp2 sp ep2": Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=4),
    "ep2 pp2": Layout(pp=2, ep=2, num_ranks=4),
    "cp2 ep2": Layout(cp=2, ep=2, num_ranks=2),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_uneven(tmp_path_factory.mktemp(family), family)
        return made[family]

    return checkpoint


def batch() -> TrainBatch:
    return train_batches.batch(train_batches.samples(LENGTHS))


def mixture_settings(directory: Path, layout: Layout, **overrides: Any) -> MegatronTrainerSettings:
    given = {"capacity": CAPACITY, "loss": LOSS, "dispatcher": "alltoall", "optimizer_place": OptimizerPlace(distributed=False)}
    return settings_of(directory, layout, **{**given, **overrides})


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "layout", "dispatcher"),
    [
        ("qwen3_moe", "ep2", "allgather"),
        ("qwen3_moe", "ep2", "alltoall"),
        ("glm4_moe", "tp2 sp", "alltoall"),
        ("glm4_moe", "ep2", "alltoall"),
        *(
            pytest.param(family, layout, dispatcher, marks=SLOW)
            for family in ("qwen3_moe", "glm4_moe")
            for layout in LAYOUTS
            for dispatcher in ("allgather", "alltoall")
        ),
    ],
)
def test_gradients_are_those_of_the_torch_trainer(pool: RankPool, checkpoints, family: str, layout: str, dispatcher: str) -> None:
    directory, shape = checkpoints(family), LAYOUTS[layout]
    got, *_ = pool.run(shape.num_ranks, megatron_gradients, mixture_settings(directory, shape, dispatcher=dispatcher), batch())
    assert_gradients_agree(got, torch_gradients(directory, batch(), LOSS))
