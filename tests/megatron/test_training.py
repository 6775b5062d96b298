"""The Megatron trainer against the torch trainer on the same checkpoint: gradients under Hugging Face names, steps, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from fuligo.trainer.megatron_backend.layout import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, OptimizerPlace
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch
from tests import tiny, train_batches
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (4, 30)]
"""(prompt, response); the last is a micro-batch of its own."""
CAPACITY = Capacity(max_tokens=34)

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp3 uneven": Layout(pp=3, num_layers_first_stage=1, num_layers_last_stage=1, num_ranks=3),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "tp2 pp2": Layout(tp=2, pp=2, num_ranks=4),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
}
LOSSES = {
    "entropy": LossSettings(entropy_coef=0.01),
    "gspo per token": LossSettings(surrogate="gspo", per_token=True),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4)


@pytest.fixture(scope="module")
def batch(checkpoint: Path) -> TrainBatch:
    """Old log-probabilities are near the policy's, so that ratios differ from 1 and some are clipped."""
    samples = train_batches.samples(LENGTHS)
    logprobs = TorchRankWorker(torch_settings(checkpoint), World()).logprobs(samples)
    assert logprobs is not None
    return train_batches.batch(train_batches.with_old_logprobs(samples, noise=0.2, logprobs=logprobs))


def torch_settings(directory: Path, **overrides: object) -> TorchTrainerSettings:
    megatron = settings_of(directory, Layout(), capacity=CAPACITY, score_capacity=CAPACITY)
    common = {name: getattr(megatron, name) for name in TrainerSettings.__dataclass_fields__}
    return TorchTrainerSettings(**{**common, **overrides})


def torch_gradients(directory: Path, batch: TrainBatch, loss: LossSettings) -> dict[str, Tensor]:
    worker = TorchRankWorker(torch_settings(directory, loss=loss), World())
    worker.gradients(batch, 0)
    return {name: parameter.grad for name, parameter in worker.policy.model.named_parameters() if parameter.grad is not None}


def megatron_gradients(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> dict[str, Tensor] | None:
    """Of the whole model, by Hugging Face name, on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.gradients(batch, 0)
    for chunk in worker.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    gradients = {name: tensor.clone() for name, tensor in worker.named_weights()}
    return gradients if world.rank == 0 else None


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        *(pytest.param(layout, "entropy", id=layout) for layout in LAYOUTS),
        *(pytest.param(layout, "gspo per token", id=f"{layout}, gspo per token") for layout in ("cp2", "dp2")),
    ],
)
def test_gradients_are_those_of_the_torch_trainer(pool: RankPool, checkpoint: Path, batch: TrainBatch, layout: str, loss: str) -> None:
    settings = settings_of(
        checkpoint,
        LAYOUTS[layout],
        capacity=CAPACITY,
        loss=LOSSES[loss],
        chunk_tokens=7,
        optimizer_place=OptimizerPlace(distributed=False),
    )
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch)
    want = torch_gradients(checkpoint, batch, LOSSES[loss])
    assert got is not None and got.keys() == want.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 1e-5 * largest, name
