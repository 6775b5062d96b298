"""Model in training, with its optimizer and its counters."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from fuligo.errors import TrainerError
from fuligo.trainer.ranks.settings import OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress, StepGradients, require_finite
from fuligo.trainer.torch_backend.optimizer import apply_step, build_optimizer, gradient_norm


class Learner:
    """Learner of the policy or of a value model.

    Args:
        model: already sharded, its frozen parameters frozen.
        flag: flag of the learning rate.
        whose: for error messages, if there is more than one model: `of the value model`.
    """

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, world: World, *, flag: str = "--lr", whose: str = "") -> None:
        self.model = model
        self.optimizer = build_optimizer(model, settings)
        self.progress = Progress()
        self._settings, self._world = settings, world
        self._flag, self._whose = flag, whose

    def step(self, gradients: StepGradients) -> dict[str, float]:
        """Update the weights by their gradients; return the metrics of the step, over all ranks.

        Raises:
            TrainerError: a loss or the gradient is not finite; the weights are unchanged.
        """
        grad_norm = gradient_norm(self.optimizer)
        self._check_finite(gradients.losses, grad_norm)
        lr = apply_step(self.optimizer, self._settings, step=self.progress.num_optimizer_steps, grad_norm=grad_norm)
        self.progress.num_optimizer_steps += 1
        sums = gradients.sums.with_vector(self._world.sum(gradients.sums.vector()))
        return {**sums.means(), "lr": lr, "grad_norm": grad_norm}

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        return [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]

    def _check_finite(self, losses: Tensor, grad_norm: float) -> None:
        """Check the losses of all ranks and the norm of the whole gradient, so that all ranks decide alike."""
        all_losses = losses.new_zeros(self._world.size, len(losses))
        all_losses[self._world.rank] = losses
        number = self.progress.num_optimizer_steps
        try:
            require_finite(self._world.sum(all_losses), grad_norm, optimizer_step=number, flag=self._flag, whose=self._whose)
        except TrainerError:
            self.optimizer.zero_grad(set_to_none=True)
            raise
