"""Value model of one rank: the policy's stages with an output layer of one row, its optimizer, and the passes through it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from fuligo.config.groups import TrainFlags
from fuligo.formats.checkpoint_files import is_distributed
from fuligo.models.names import ModelNames, value_names
from fuligo.trainer.critic import BaseCritic
from fuligo.trainer.megatron_backend.gradients import Row, cp_group, head_weight, reports, rows_of, run_rows, step_gradients
from fuligo.trainer.megatron_backend.learner import Learner, gather_parameters, zero_gradients
from fuligo.trainer.megatron_backend.logprobs import gather_tokens
from fuligo.trainer.megatron_backend.model import PolicyModel, build_chunks
from fuligo.trainer.megatron_backend.router import begin_step, take_balance_loss
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.state import MegatronState, load_weights
from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
from fuligo.trainer.objective import Objective, value_objective
from fuligo.trainer.parameters import DTYPES
from fuligo.trainer.ranks.settings import CriticSettings, TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import StepGradients
from fuligo.types import FloatArray


class Critic(BaseCritic):
    """Critic of one rank."""

    def __init__(self, settings: CriticSettings, policy: MegatronTrainerSettings, names: ModelNames, world: World) -> None:
        """Load the initial weights and build the optimizer.

        Raises CheckpointError if the initial weights cannot be read or do not have the policy's architecture.
        """
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
        return compute_values(self.learner.chunks, share, self._model, self._world.device)

    def gradients(self, step: StepShare) -> StepGradients | None:
        zero_gradients(self.learner.chunks)
        return compute_value_gradients(self.learner.chunks, step, self._model, self._world.device, clip=self.settings.clip)

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
            chunk.output_layer = head  # pyright: ignore[reportAttributeAccessIssue]  # Megatron's own is parallel
    return chunks


def compute_value_gradients(
    chunks: Sequence[nn.Module], step: StepShare, settings: MegatronTrainerSettings, device: torch.device, *, clip: float
) -> StepGradients | None:
    """Sum the gradients of the value loss into the stages' buffers, and return what `gradients.compute_gradients` returns, without
    scores. A collective."""
    samples = step.samples
    rows = rows_of(samples.samples, step.schedule, settings, device, inputs_of=lambda plan: samples.micro_batch(plan, device))
    results: list[Objective] = []

    def loss_of(chunk: nn.Module, row: Row, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert row.inputs is not None
        result = value_objective(_values(chunk, row, hidden), row.inputs, clip)
        results.append(Objective(result.loss.detach(), result.sums))
        # With three values and `calculate_per_token_loss`, Megatron does not divide the loss.
        return result.loss, torch.zeros((), dtype=torch.int), {}

    begin_step(chunks, samples.num_tokens)
    run_rows(chunks, rows, step.schedule, loss_of, with_gradients=True)
    take_balance_loss(chunks)  # trains the routers as in the policy, but is not reported as a metric
    if not reports():
        return None
    return step_gradients(rows, results, {})


@torch.no_grad()
def compute_values(
    chunks: Sequence[nn.Module], share: ScoreShare, settings: MegatronTrainerSettings, device: torch.device
) -> dict[int, FloatArray]:
    """Return the [R] values of this replica's samples by position in the whole list; empty if this rank does not report (see `reports`).

    A collective.
    """
    rows = rows_of(share.samples, share.schedule, settings, device, inputs_of=lambda _: None)
    found: dict[int, FloatArray] = {}

    def keep(chunk: nn.Module, row: Row, hidden: Tensor, *, non_loss_data: bool = True) -> None:
        del non_loss_data
        values = _values(chunk, row, hidden)
        if reports() and row.plan.counts:
            columns = values.cpu().split(row.tokens.response_lengths)
            found.update((share.positions[i], column.numpy()) for i, column in zip(row.plan.samples, columns, strict=True))

    run_rows(chunks, rows, share.schedule, keep, with_gradients=False)
    return found


def _values(chunk: nn.Module, row: Row, hidden: Tensor) -> Tensor:
    """Return the [N] float32 values of the response tokens, on all TP and CP ranks."""
    packed = row.packed
    own = hidden[packed.local_rows].float() @ head_weight(chunk).float().squeeze(0)
    return gather_tokens(own, packed.local_ids, len(row.tokens.targets), cp_group())
