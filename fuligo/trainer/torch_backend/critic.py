"""The value model of one rank with all that training it needs."""

from __future__ import annotations

from fuligo.trainer.critic import BaseCritic
from fuligo.trainer.ranks.settings import CriticSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import StepShare
from fuligo.trainer.step import StepGradients
from fuligo.trainer.torch_backend.gradients import compute_value_gradients
from fuligo.trainer.torch_backend.learner import Learner
from fuligo.trainer.torch_backend.value_model import ValueModel


class Critic(BaseCritic):
    """Learns the returns of the policy's samples."""

    def __init__(self, value_model: ValueModel, settings: CriticSettings, world: World) -> None:
        self.value_model = value_model
        self.learner = Learner(value_model.model, settings.optimizer, world, flag="--critic-lr", whose="of the value model")
        super().__init__(settings, self.learner.progress, world)

    def gradients(self, step: StepShare) -> StepGradients:
        """Leave the gradient of the step's value loss in the parameters."""
        return compute_value_gradients(self.value_model, step, clip=self.settings.clip, device=self._world.device)

    def step(self, gradients: StepGradients) -> dict[str, float]:
        """As `Learner.step`, under names beside the policy's."""
        metrics = self.learner.step(gradients)
        own = {"critic_lr": metrics.pop("lr"), "critic_grad_norm": metrics.pop("grad_norm")}
        return metrics | own
