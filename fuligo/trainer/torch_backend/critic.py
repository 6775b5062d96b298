"""Value model of one rank, with its optimizer."""

from fuligo.trainer.critic import BaseCritic
from fuligo.trainer.ranks.settings import CriticSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import StepShare
from fuligo.trainer.step import StepGradients
from fuligo.trainer.torch_backend.gradients import compute_value_gradients
from fuligo.trainer.torch_backend.learner import Learner
from fuligo.trainer.torch_backend.value_model import ValueModel


class Critic(BaseCritic):
    """Critic that learns the returns of the policy's samples."""

    def __init__(self, value_model: ValueModel, settings: CriticSettings, world: World) -> None:
        self.value_model = value_model
        self.learner = Learner(value_model.model, settings.optimizer, world, flag="--critic-lr", whose="of the value model")
        super().__init__(settings, self.learner.progress, world)

    def gradients(self, step: StepShare) -> StepGradients:
        """Compute the gradient of the step's value loss into the parameters."""
        return compute_value_gradients(self.value_model, step, clip=self.settings.clip, device=self._world.device)

    def step(self, gradients: StepGradients) -> dict[str, float]:
        """Call `Learner.step`, and name the metrics so that they go beside the policy's."""
        metrics = self.learner.step(gradients)
        own = {"critic_lr": metrics.pop("lr"), "critic_grad_norm": metrics.pop("grad_norm")}
        return metrics | own
