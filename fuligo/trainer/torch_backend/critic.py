"""Value model of one rank (the policy's architecture with an output layer of one row) and its optimizer."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import CheckpointError
from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import MTP_PREFIX
from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.ranks.settings import CriticSettings
from fuligo.trainer.ranks.worker import BaseCritic
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients
from fuligo.trainer.torch_backend.learner import Learner, compute_scores, compute_value_gradients
from fuligo.trainer.torch_backend.model import PackedModel, output_head, read_model, require_whole
from fuligo.trainer.torch_backend.weights import weight_tensors
from fuligo.types import FloatArray


class ValueModel(PackedModel):
    """Value model that maps packed tokens to the expected return before each of their response tokens."""

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Return the [N] float32 values of the response tokens."""
        hidden, head = self.predicting_hidden(tokens), output_head(self.model)
        return hidden.float() @ head.weight.float().squeeze(0)


def load_value_model(directory: Path, policy: PreTrainedModel) -> PreTrainedModel:
    """Load the causal LM in `directory` with an output layer [1, E], in float32 on the CPU.

    An output layer of one row is loaded, because the files are then a value model's. Otherwise the layer starts at zero, not at random, so
    that for any seed and number of ranks the first values are 0, the first advantages are plain returns, and no noise reaches the layers
    below.

    Raises CheckpointError if the files cannot be read, or the model does not have the policy's architecture.
    """
    model, lacking = read_model(directory)
    old_head = model.get_output_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is old_head)
    require_whole(directory, {key: text for key, text in lacking.items() if key != name})
    head = nn.Linear(output_head(model).weight.shape[1], 1, bias=False)
    files = HuggingFaceTensors(directory)
    with torch.no_grad():
        head.weight.copy_(files.read(name)) if files.shapes.get(name, (0,))[0] == 1 else head.weight.zero_()
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    _require_same_architecture(directory, model, policy, head=name)
    return model


def _require_same_architecture(directory: Path, model: PreTrainedModel, policy: PreTrainedModel, *, head: str) -> None:
    left_out = (head, MTP_PREFIX)
    ours, theirs = (
        {name: tuple(tensor.shape) for name, tensor in weight_tensors(each).items() if not name.startswith(left_out)}
        for each in (model, policy)
    )
    if different := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        name = different[0]
        raise CheckpointError(
            f"cannot load the value model {directory}: it must have the policy's architecture, but {name} is {_shown(ours.get(name))} "
            f"there and {_shown(theirs.get(name))} in the policy; use another --critic-load, or none to start from the policy's weights"
        )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


class Critic(BaseCritic):
    """Critic of one rank."""

    def __init__(self, value_model: ValueModel, settings: CriticSettings, world: World) -> None:
        self.value_model = value_model
        super().__init__(settings, world)
        self.learner = Learner(value_model.model, settings.optimizer, world, flag="--critic-lr", whose="of the value model")

    def values(self, share: ScoreShare) -> dict[int, FloatArray]:
        return compute_scores(self.value_model, share, self._world.device)

    def gradients(self, step: StepShare) -> StepGradients:
        return compute_value_gradients(self.value_model, step, clip=self.settings.clip, device=self._world.device)
