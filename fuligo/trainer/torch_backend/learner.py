"""Model in training, with AdamW over its trained parameters, and its counters."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fuligo.errors import TrainerError
from fuligo.trainer.ranks.settings import OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress, StepGradients, require_finite
from fuligo.trainer.trained_parameters import trained_names


class Learner:
    """Learner of the policy or of a value model.

    Args:
        model: already sharded, its frozen parameters frozen.
        whose: for error messages, if there is more than one model: `of the value model`.
    """

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, world: World, *, flag: str = "--lr", whose: str = "") -> None:
        self.model = model
        self.optimizer = _build_optimizer(model, settings)
        self.progress = Progress()
        self._settings, self._world = settings, world
        self._flag, self._whose = flag, whose

    def step(self, gradients: StepGradients) -> dict[str, float]:
        """Update the weights by their gradients; return the metrics of the step, over all ranks.

        Raises:
            TrainerError: a loss or the gradient is not finite; the weights are unchanged.
        """
        parameters: list[Tensor] = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()  # over all ranks
        self._check_finite(gradients.losses, grad_norm)
        lr = self._settings.schedule.at(self.progress.num_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._settings.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.clip_grad, torch.tensor(grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
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


def freeze_parameters(model: nn.Module, trained: TrainedParameters) -> None:
    """Switch off the gradient of all parameters that are not trained.

    Raises:
        ConfigError: the lists do not fit the model.
    """
    parameters = dict(model.named_parameters())
    chosen = trained_names({name: (name,) for name in parameters}, trained)
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and name in chosen)


def _build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Build AdamW: matrices decay, parameters with fewer axes (norms, biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.schedule.peak, betas=settings.betas, eps=settings.eps, fused=True)
