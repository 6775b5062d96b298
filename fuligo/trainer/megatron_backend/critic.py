"""Value model of one rank: the policy's stages with an output layer of one row, its optimizer, and the passes through it."""

from dataclasses import replace

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from fuligo.config.groups import TrainFlags
from fuligo.formats.checkpoint_files import is_distributed
from fuligo.models.names import ModelNames, value_names
from fuligo.trainer.batch import MicroBatch
from fuligo.trainer.megatron_backend.gradients import Row, compute_scores, head_weight, sum_gradients
from fuligo.trainer.megatron_backend.learner import Learner, gather_parameters, zero_gradients
from fuligo.trainer.megatron_backend.logprobs import gather_tokens
from fuligo.trainer.megatron_backend.model import PolicyModel, build_chunks
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.state import MegatronState, load_weights
from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
from fuligo.trainer.megatron_backend.weights.local import rank_groups
from fuligo.trainer.objective import Objective, value_objective
from fuligo.trainer.parameters import DTYPES
from fuligo.trainer.ranks.settings import CriticSettings, TrainedParameters
from fuligo.trainer.ranks.worker import BaseCritic
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients
from fuligo.types import FloatArray


class Critic(BaseCritic):
    """Critic of one rank."""

    def __init__(self, settings: CriticSettings, policy: MegatronTrainerSettings, names: ModelNames, world: World) -> None:
        """Load the initial weights and build the optimizer. Raises CheckpointError if they are damaged or of another architecture."""
        self.names = value_names(names)
        self._model = replace(  # no tied head, no MTP layers, all parameters trained, no routing replay
            policy,
            optimizer=settings.optimizer,
            trained=TrainedParameters(),
            model_flags={**policy.model_flags, "untie_embeddings_and_output_weights": True},
            mtp=TrainFlags(),
            routing=None,
            records_routing=False,
        )
        chunks = build_value_chunks(self._model)
        if is_distributed(settings.initial_weights):
            load_weights(settings.initial_weights, chunks, self.names, world)
        else:
            load_hugging_face(chunks, settings.initial_weights, is_value_model=True)
        super().__init__(settings, world)
        self.learner = Learner(chunks, self._model, world, flag="--critic-lr", whose="of the value model")

    def values(self, share: ScoreShare) -> dict[int, FloatArray]:
        return compute_scores(self.learner.chunks, share, self._model, self._world.device, _values).of_tokens

    def gradients(self, step: StepShare) -> StepGradients | None:
        def loss_of(chunk: nn.Module, row: Row, inputs: MicroBatch, hidden: Tensor) -> Objective:
            return value_objective(_values(chunk, row, hidden), inputs, self.settings.clip)

        zero_gradients(self.learner.chunks)
        found = sum_gradients(self.learner.chunks, step, self._model, self._world.device, loss_of, {})
        if found is not None:
            found.sums.shares.pop("moe_balance_loss", None)  # it trains the routers, but the metric is the policy's
        return found

    def end_rollout(self) -> None:
        super().end_rollout()
        gather_parameters(self.learner.chunks)

    def state(self) -> MegatronState:
        learner = self.learner
        return MegatronState(learner.chunks, self.names, learner.optimizer, self._model.layout, learner.progress)


def build_value_chunks(settings: MegatronTrainerSettings) -> list[PolicyModel]:
    """Build stages like `build_chunks`, with a zero-initialized head [1, E] on the last stage, replicated on all TP ranks."""
    chunks = build_chunks(settings, trained=True)
    for chunk in chunks:
        chunk.has_whole_head = True
        if chunk.post_process:
            dtype = DTYPES[settings.precision]
            head = torch.nn.Linear(settings.model_flags["hidden_size"], 1, bias=False, dtype=dtype, device=settings.device)
            torch.nn.init.zeros_(head.weight)
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(head.weight)
            chunk.output_layer = head  # pyrefly: ignore[bad-assignment]  # Megatron's own is parallel
    return chunks


def _values(chunk: nn.Module, row: Row, hidden: Tensor) -> Tensor:
    """Return the [N] float32 values of the response tokens, on all TP and CP ranks."""
    packed = row.packed
    own = hidden[packed.local_rows].float() @ head_weight(chunk).float().squeeze(0)
    return gather_tokens(own, packed.local_ids, len(row.tokens.targets), rank_groups().context)
