"""Training of one model: AdamW over its trained parameters, its counters, and the gradients of an optimizer step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import ConfigError, TrainerError
from fuligo.trainer.batch import MicroBatch, PackedTokens, pack_tokens
from fuligo.trainer.metric_sums import MetricSums
from fuligo.trainer.mtp import MTPTraining, later_tokens, mtp_loss
from fuligo.trainer.objective import LossSettings, Objective, objective, value_objective
from fuligo.trainer.packing import MicroBatchPlan
from fuligo.trainer.parameters import trained_names
from fuligo.trainer.ranks.settings import OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import ScoreShare, StepShare
from fuligo.trainer.step import Progress, StepGradients, loss_inputs, losses_of_ranks, require_finite, total
from fuligo.trainer.torch_backend.model import PackedModel, Policy
from fuligo.types import FloatArray, TokenScores


class Learner:
    """Optimizer and counters of the policy or of a value model.

    Args:
        model: model that is already sharded and whose untrained parameters are frozen.
        flag: flag of the learning rate, for error messages.
        whose: phrase that names the model in error messages, such as `of the value model`; empty for the policy.
    """

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, world: World, *, flag: str = "--lr", whose: str = "") -> None:
        self.model = model
        self.optimizer = _build_optimizer(model, settings)
        self.progress = Progress()
        self._settings, self._world = settings, world
        self._flag, self._whose = flag, whose

    def step(self, gradients: StepGradients, num_micro_batches: int) -> tuple[float, float]:
        """Clip the gradients, update the weights, and return (learning rate, gradient norm before clipping). A collective.

        Raises TrainerError if a loss or the gradient is not finite; the weights are unchanged.
        """
        parameters: list[Tensor] = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()  # over all ranks
        losses = losses_of_ranks(gradients, num_micro_batches, self._world)
        step = self.progress.num_optimizer_steps
        try:
            require_finite(losses, grad_norm, optimizer_step=step, flag=self._flag, whose=self._whose)
        except TrainerError:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        lr = self._settings.schedule.at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._settings.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.clip_grad, torch.tensor(grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.num_optimizer_steps += 1
        return lr, grad_norm

    @torch.no_grad()
    def allocate_state(self) -> None:
        """Allocate moments that do not exist yet, before engines take the free memory; AdamW would do so in its first step."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if self.optimizer.state.get(parameter):
                    continue
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

    def tensors(self) -> list[Tensor]:
        return [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def freeze_parameters(model: nn.Module, trained: TrainedParameters) -> None:
    """Disable the gradients of all parameters that are not trained. Raises ConfigError if `trained` does not fit the model."""
    parameters = dict(model.named_parameters())
    chosen = trained_names({name: (name,) for name in parameters}, trained)
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and name in chosen)


def _build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Build AdamW with weight decay for matrices only: not for biases (even if stacked over experts), norms and sinks.

    Raises ConfigError if all parameters are frozen.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError(
            "cannot train: --only-train-params-name-list and --freeze-params-name-list leave only parameters that are frozen anyway (an "
            "MTP layer without --enable-mtp-training, a vision tower without images); select other parameters"
        )
    decays = {name: parameter.dim() >= 2 and not name.endswith("bias") for name, parameter in trained.items()}
    groups = [
        {"params": [p for name, p in trained.items() if decays[name]], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in trained.items() if not decays[name]], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.schedule.peak, betas=settings.betas, eps=settings.eps, fused=True)


def compute_gradients(
    policy: Policy, step: StepShare, *, settings: LossSettings, device: torch.device, mtp: MTPTraining | None = None
) -> StepGradients:
    """Add the gradients of a rank's share of an optimizer step's loss to the parameters' `grad`; return its losses, metrics and scores.

    `mtp`: training of the MTP layer, whose loss is added; None: the MTP layer is not trained.
    """
    scores: dict[int, TokenScores] = {}

    def loss_of(plan: MicroBatchPlan, inputs: MicroBatch) -> Objective:
        if mtp is None:
            outputs = policy(inputs.tokens)
            scores.update(step.samples.scores(plan, inputs.tokens, outputs))
            return objective(loss_inputs(inputs, outputs, settings), settings)
        later = later_tokens(inputs.tokens, 1)
        outputs, further = policy.with_mtp(inputs.tokens, later, is_joint=mtp.is_joint)
        scores.update(step.samples.scores(plan, inputs.tokens, outputs))
        result = objective(loss_inputs(inputs, outputs, settings), settings)
        of_layer = mtp_loss([further], [later], inputs.weights)
        result.sums.shares["mtp_loss"] = of_layer.detach()
        return Objective(result.loss + mtp.factor * of_layer, result.sums)

    return _sum_gradients(step, loss_of, scores, device)


def compute_value_gradients(
    value_model: Callable[[PackedTokens], Tensor], step: StepShare, *, clip: float, device: torch.device
) -> StepGradients:
    """Add the gradients of the value loss to the parameters' `grad`; return its losses and metrics, without scores."""
    return _sum_gradients(step, lambda _, inputs: value_objective(value_model(inputs.tokens), inputs, clip), {}, device)


def _sum_gradients(
    step: StepShare,
    loss_of: Callable[[MicroBatchPlan, MicroBatch], Objective],
    scores: dict[int, TokenScores],
    device: torch.device,
) -> StepGradients:
    """Run the backward pass of each micro-batch's loss; return the results, with `scores`, which `loss_of` fills in."""
    sums: list[MetricSums] = []
    losses: list[Tensor] = []
    num_tokens = num_row_tokens = 0
    for plan in step.schedule.plans:
        inputs = step.samples.micro_batch(plan, device)
        result = loss_of(plan, inputs)
        result.loss.backward()
        sums.append(result.sums)
        losses.append(result.loss.detach())
        if plan.counts:
            num_tokens += inputs.tokens.num_sample_tokens
            num_row_tokens += inputs.tokens.num_tokens
    return StepGradients(total(sums), torch.stack(losses), scores, num_tokens, num_tokens - num_row_tokens)


@torch.no_grad()
def compute_scores(
    model: PackedModel, share: ScoreShare, device: torch.device, of: Callable[[Any], Tensor] = lambda outputs: outputs
) -> dict[int, FloatArray]:
    """Run the model on this rank's samples; return [R] scores, which `of` selects from its outputs, by position among all samples."""
    found: dict[int, FloatArray] = {}
    for plan in share.schedule.plans:
        tokens = pack_tokens([share.samples[i] for i in plan.samples], device, shared=plan.shared)
        columns = of(model(tokens)).cpu().split(tokens.response_lengths)
        found |= {share.positions[i]: column.numpy() for i, column in zip(plan.samples, columns, strict=True)}
    model.release_gathered()
    return found
