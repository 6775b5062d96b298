"""Gradients of whole models by published names, from the Megatron and the torch trainer, and their comparison."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch
from tests import shares
from tests.megatron.checkpoints import expert_by_expert
from tests.megatron.policies import settings_of


def megatron_gradients(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> dict[str, Tensor] | None:
    """Return the gradients of the first step of `batch` on rank 0, with 0 for frozen weights; None on other ranks."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.gradients(shares.to_train(worker, batch)[0])
    for chunk in worker.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(getattr(parameter, "main_grad", 0 * parameter.data))
    gradients = {name: tensor.clone() for name, tensor in worker.named_weights() if not name.endswith("e_score_correction_bias")}
    return gradients if world.rank == 0 else None


def torch_gradients(directory: Path, batch: TrainBatch, loss: LossSettings) -> dict[str, Tensor]:
    """Return the gradients of the first step of `batch`."""
    megatron = settings_of(directory, Layout(), loss=loss)
    worker = TorchRankWorker(
        TorchTrainerSettings(**{name: getattr(megatron, name) for name in TrainerSettings.__dataclass_fields__}), World()
    )
    worker.gradients(shares.to_train(worker, batch)[0])
    found = {name: parameter.grad for name, parameter in worker.policy.model.named_parameters()}
    return expert_by_expert({name: gradient for name, gradient in found.items() if gradient is not None})


def assert_gradients_agree(got: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor], *, relative: float = 1e-5) -> None:
    """Compare gradients within `relative` times the largest one."""
    assert got is not None and got.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    differences = {name: float((got[name] - gradient).abs().max() / largest) for name, gradient in expected.items()}
    assert max(differences.values()) <= relative, {name: value for name, value in differences.items() if value > relative}
