"""Model in training: its stages in Megatron's data parallelism, its optimizer, and its counters."""

from collections.abc import Sequence

import torch

from fuligo.errors import TrainerError
from fuligo.trainer.megatron_backend.data_parallel import wrap, zero_gradients
from fuligo.trainer.megatron_backend.model import PolicyModel
from fuligo.trainer.megatron_backend.optimizer import apply_step, build_optimizer, gradient_norm
from fuligo.trainer.megatron_backend.router import move_corrections
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress, StepGradients, require_finite


class Learner:
    """Learner of the policy or of a value model.

    Args:
        chunks: this rank's stages with their first weights, their frozen parameters frozen.
        whose: for error messages, if there is more than one model: `of the value model`.
    """

    def __init__(
        self, chunks: Sequence[PolicyModel], settings: MegatronTrainerSettings, world: World, *, flag: str = "--lr", whose: str = ""
    ) -> None:
        self.chunks = wrap(chunks, settings)
        self.optimizer = build_optimizer(self.chunks, settings)
        self.progress = Progress()
        self._settings, self._world = settings, world
        self._flag, self._whose = flag, whose

    def step(self, gradients: StepGradients | None, num_micro_batches: int) -> tuple[float, float]:
        """Update the weights by the gradients in the stages' buffers; return (learning rate, gradient norm). A collective.

        Raises:
            TrainerError: a loss or the gradient is not finite; the weights are unchanged.
        """
        grad_norm = gradient_norm(self.optimizer)
        self._check_finite(gradients, num_micro_batches, grad_norm)
        lr = apply_step(self.optimizer, self._settings.optimizer, step=self.progress.num_optimizer_steps, grad_norm=grad_norm)
        move_corrections(self.chunks)
        self.optimizer.zero_grad()
        self.progress.num_optimizer_steps += 1
        return lr, grad_norm

    def _check_finite(self, gradients: StepGradients | None, num_micro_batches: int, grad_norm: float) -> None:
        """Check the losses of all ranks and the norm of the whole gradient, so that all ranks decide alike."""
        losses = torch.zeros(self._world.size, num_micro_batches, device=self._world.device)
        if gradients is not None:
            losses[self._world.rank] = gradients.losses
        number = self.progress.num_optimizer_steps
        try:
            require_finite(self._world.sum(losses), grad_norm, optimizer_step=number, flag=self._flag, whose=self._whose)
        except TrainerError:
            self.optimizer.zero_grad()
            zero_gradients(self.chunks)
            raise
