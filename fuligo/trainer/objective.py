"""Losses of policy and value model on a packed micro-batch, shared by all backends. Axes: N response tokens, S samples.

Policy loss = sum_t weight_t * (pg_t * tis_t * opsm_t - entropy_coef * H_t + kl_loss_coef * kl_t)

`weights` include the denominators of the whole optimizer step (`algorithms/assign.py`), so the losses of a step's micro-batches
and ranks are added, never averaged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.kl import kl_estimate
from fuligo.algorithms.off_policy import Correction, ImportanceWeights, importance_weights, opsm_mask
from fuligo.algorithms.policy_loss import Clip, Segments, exp_ratio
from fuligo.algorithms.settings import KlType
from fuligo.algorithms.value_loss import value_fit, value_loss
from fuligo.errors import TrainerError
from fuligo.trainer.batch import MicroBatch
from fuligo.trainer.metric_sums import MetricSums, is_maximum
from fuligo.types import TrainSample


@dataclass(slots=True)
class LossInputs:
    """Inputs of the loss: the response tokens of all samples of a micro-batch, one sample after another.

    Float tensors are float32. Values at masked tokens are ignored and may be anything.
    """

    logprobs: Tensor
    """[N] policy's log-probabilities, with gradient; full vocabulary, temperature applied."""
    entropy: Tensor
    """[N] nats; with gradient only for a custom loss or if `entropy_coef` is not 0."""
    advantages: Tensor
    """[N] advantage of each token."""
    loss_mask: Tensor
    """[N] 1 on tokens to train, else 0."""
    weights: Tensor
    """[N] share of each token in the step's loss, 0 where masked."""
    sample_ids: Tensor
    """[N] int64 index of each token's sample, 0 to S - 1."""
    num_samples: int
    """S, the number of samples."""
    engine_logprobs: Tensor | None = None
    """[N] log-probabilities of the engine that sampled; None without an engine (SFT)."""
    old_logprobs: Tensor | None = None
    """[N] trainer's log-probabilities before the rollout's first optimizer step; None if they equal the current ones (one step per
    rollout) or are not used (--use-rollout-logprobs). A custom loss then gets the current or the engine's ones, respectively."""
    ref_logprobs: Tensor | None = None
    """[N] reference model's log-probabilities; None without a reference model."""
    teacher_logprobs: Tensor | None = None
    """[N] teacher's log-probabilities; None without a teacher. Used only for a metric, because the advantages already include them."""

    share: float = 1.0
    """Factor of a loss from `LossSettings.reducer`: 1 / (number of trajectories of the step), or with `per_token` 1 / (number of its
    trained tokens). `weights` already include it."""
    total_lengths: Sequence[int] = ()
    """[S] number of prompt and response tokens."""
    response_lengths: Sequence[int] = ()
    """[S] number of response tokens."""

    @property
    def segments(self) -> Segments:
        return Segments(self.loss_mask, self.sample_ids, self.num_samples)


CustomLoss = Callable[[LossInputs, Tensor], tuple[Tensor, Mapping[str, Tensor | float]]]
"""Hook (batch, logprobs [N]) -> (loss, metrics), both as the micro-batch's share of the step's values: (batch.weights * x).sum(). A metric
whose name ends in `_max` is the micro-batch's maximum instead."""
LossReducer = Callable[[list[int], list[int], list[Tensor], bool], Callable[[Tensor], Tensor]]
"""Hook (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> function that reduces [N] to a scalar."""
CustomWeights = Callable[[LossInputs, Tensor], Tensor]
"""Hook (batch, old_logprobs [N]) -> [N] factors of the policy-gradient term."""


@dataclass(slots=True, frozen=True)
class KlLoss:
    """KL divergence to the reference model as a loss term."""

    coef: float
    kind: KlType = "k1"
    unbiased: bool = False
    """True to multiply the estimate by pi / pi_old."""


@dataclass(slots=True, frozen=True)
class LossSettings:
    """Terms and coefficients of the loss."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    estimator: str = "grpo"
    """Key of `ESTIMATORS`; its policy loss is used."""
    clip: Clip = field(default_factory=Clip)
    entropy_coef: float = 0.0
    kl_loss: KlLoss | None = None
    """KL to the reference model as a term of the loss; None: no term."""
    correction: Correction | None = None
    """Importance weights between engine and trainer; None: no correction."""
    opsm_delta: float | None = None
    """Off-policy sequence masking (OPSM): largest distance from the old policy, in nats per token, at which a sample with negative
    advantage is still trained; None: no masking."""
    old_from_engine: bool = False
    """True to use the engine's log-probabilities as the old policy's (--use-rollout-logprobs)."""
    per_token: bool = False
    """True to average over all tokens of the step instead of over each sample first; the caller builds `weights` accordingly."""
    custom_loss: CustomLoss | None = None
    """Hook that computes the loss; None unless `loss_type` is custom_loss."""
    custom_weights: CustomWeights | None = None
    """Hook that replaces `correction`; None: no hook."""
    reducer: LossReducer | None = None
    """Hook that replaces the mean over each sample's tokens in the policy-gradient term; the mean over trajectories (or tokens) remains.
    None: no hook."""


@dataclass(slots=True)
class Objective:
    """One micro-batch's share of the step's loss and metrics."""

    loss: Tensor
    """Scalar with gradient."""
    sums: MetricSums
    """Metrics without the `train/` prefix."""


def objective(inputs: LossInputs, settings: LossSettings) -> Objective:
    """Compute the loss and metrics of one micro-batch. Without trained tokens, loss and gradient are 0 (hooks must ensure this themselves).

    Metrics of the policy loss: `loss` is the step's loss; `pg_loss`, `kl_loss` and `entropy_loss` are its terms before their coefficients.
    The others are means over the step's trained tokens, weighted as in the loss: `entropy`, `kl` (to the reference), `opd_reverse_kl` (old
    policy to teacher), `ratio_mean`, `clip_fraction`, `logprob_abs_diff` (trainer and engine), `tis_mean` (importance weights),
    `tis_cut_fraction` (share of importance weights that were cut) and `opsm_masked_fraction` (off-policy sequence masking). Other losses
    report `loss`, `entropy`, and the metrics that a custom loss returns.

    Raises:
        TrainerError: log-probabilities that the settings need are missing, or a hook returned an invalid value.
    """
    # Rounding to bfloat16 would create ratios and KL divergences that do not exist.
    assert torch.finfo(inputs.logprobs.dtype).bits >= 32, f"log-probabilities of type {inputs.logprobs.dtype}; float32 is needed"
    if settings.loss_type == "custom_loss":
        return _custom_loss(inputs, settings)
    trained = _trained(inputs)
    if settings.loss_type == "policy_loss":
        return _policy_loss(trained, settings)
    loss = -(trained.weights * trained.logprobs).sum()  # the negative log-likelihood of the trained tokens
    return Objective(loss, MetricSums.of({"loss": loss}, {"entropy": trained.entropy}, trained.weights))


def _trained(inputs: LossInputs) -> LossInputs:
    """Return the inputs with 0 at masked tokens, because values there may be NaN, which must not reach the loss even multiplied by 0."""
    mask = inputs.loss_mask != 0
    names = ("logprobs", "entropy", "advantages", "weights", "engine_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs")
    given = {name: values for name in names if (values := getattr(inputs, name)) is not None}
    masked: dict[str, Any] = {name: torch.where(mask, values, 0.0) for name, values in given.items()}
    return replace(inputs, **masked)


def _policy_loss(inputs: LossInputs, settings: LossSettings) -> Objective:
    weights, logprobs = inputs.weights, inputs.logprobs
    own_old = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    old = _needed(inputs.engine_logprobs, "--use-rollout-logprobs", "engine") if settings.old_from_engine else own_old
    terms = ESTIMATORS[settings.estimator].policy_loss(logprobs, old, inputs.advantages, settings.clip, inputs.segments)
    pg, correction = terms.loss, _correction(inputs, own_old, settings)
    if correction is not None:
        pg = pg * correction.weights
    totals = {"entropy": inputs.entropy, "ratio_mean": terms.ratio, "clip_fraction": terms.clipped}
    if settings.opsm_delta is not None:
        masked = opsm_mask(logprobs, old, inputs.advantages, settings.opsm_delta, inputs.segments)
        pg = torch.where(masked, 0.0, pg)
        totals["opsm_masked_fraction"] = masked
    pg_loss = (weights * pg).sum() if settings.reducer is None else _reduced(pg, inputs, settings.reducer, settings)
    loss = pg_loss
    shares = {"pg_loss": pg_loss}
    if settings.entropy_coef:
        entropy_loss = (weights * inputs.entropy).sum()
        loss = loss - settings.entropy_coef * entropy_loss
        shares["entropy_loss"] = entropy_loss
    if settings.kl_loss is not None:
        reference, kind = _needed(inputs.ref_logprobs, "--use-kl-loss", "reference"), settings.kl_loss.kind
        kl = kl_estimate(logprobs, reference, kind)
        kl_loss = (weights * (kl_estimate(logprobs, reference, kind, exp_ratio(logprobs - old)) if settings.kl_loss.unbiased else kl)).sum()
        loss = loss + settings.kl_loss.coef * kl_loss
        shares["kl_loss"] = kl_loss
        totals["kl"] = kl
    elif inputs.ref_logprobs is not None:
        totals["kl"] = logprobs - inputs.ref_logprobs
    if inputs.teacher_logprobs is not None:
        totals["opd_reverse_kl"] = old - inputs.teacher_logprobs
    if inputs.engine_logprobs is not None:
        totals["logprob_abs_diff"] = (own_old - inputs.engine_logprobs).abs()
    if correction is not None:
        totals |= {"tis_mean": correction.weights, "tis_cut_fraction": correction.cut}
    return Objective(loss, MetricSums.of({"loss": loss, **shares}, totals, weights))


def _reduced(pg: Tensor, inputs: LossInputs, reducer: LossReducer, settings: LossSettings) -> Tensor:
    """Reduce the policy-gradient term [N] to this micro-batch's share with the user's function, which gets 0 for masked tokens.

    Raises TrainerError if the function returns anything but a scalar.
    """
    masks = list(inputs.loss_mask.split(list(inputs.response_lengths)))
    reduce = reducer(list(inputs.total_lengths), list(inputs.response_lengths), masks, settings.per_token)
    if not callable(reduce):
        raise TrainerError(
            f"--custom-pg-loss-reducer-function-path returned {reduce!r:.80}; return a function that reduces [N] to a scalar"
        )
    reduced = reduce(torch.where(inputs.loss_mask != 0, pg, 0.0))
    if not isinstance(reduced, Tensor) or reduced.numel() != 1:
        raise TrainerError(f"--custom-pg-loss-reducer-function-path: the reducer returned {reduced!r:.80}; return a tensor of one element")
    return inputs.share * reduced.reshape(())


def _correction(inputs: LossInputs, old: Tensor, settings: LossSettings) -> ImportanceWeights | None:
    if settings.custom_weights is not None:
        weights = settings.custom_weights(inputs, old)
        if not isinstance(weights, Tensor) or weights.shape != old.shape:
            given = f"weights of the shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"{weights!r:.80}"
            raise TrainerError(
                f"--custom-tis-function-path returned {given}; return a tensor with one weight for each of the {len(old)} tokens"
            )
        return ImportanceWeights(weights.detach(), cut=weights == 0)
    if settings.correction is None:
        return None
    engine = _needed(inputs.engine_logprobs, "--use-tis", "engine")
    return importance_weights(old, engine, settings.correction, inputs.segments)


def _custom_loss(inputs: LossInputs, settings: LossSettings) -> Objective:
    assert settings.custom_loss is not None
    if inputs.old_logprobs is None:  # one optimizer step per rollout, or --use-rollout-logprobs
        old = inputs.engine_logprobs if settings.old_from_engine else inputs.logprobs.detach()
        inputs = replace(inputs, old_logprobs=old)
    result = settings.custom_loss(inputs, inputs.logprobs)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor) or not isinstance(result[1], Mapping):
        raise TrainerError(f"--custom-loss-function-path must return (loss, metrics), a tensor and a dict; it returned {result!r:.80}")
    loss, metrics = result
    if loss.numel() != 1 or not loss.requires_grad:
        raise TrainerError(
            f"--custom-loss-function-path returned a loss of the shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}; "
            "return a scalar that depends on logprobs"
        )
    loss = loss.reshape(())
    # The order is fixed because sums are added by position, over micro-batches and ranks.
    values = {name: _metric(name, metrics[name]).to(loss) for name in sorted(metrics)}
    maxima = {name: value for name, value in values.items() if is_maximum(name)}
    shares = {name: value for name, value in values.items() if name not in maxima}
    trained = _trained(inputs)
    return Objective(loss, MetricSums.of({**shares, "loss": loss}, {"entropy": trained.entropy}, trained.weights, maxima))


def _metric(name: str, value: Tensor | float) -> Tensor:
    try:
        return torch.as_tensor(value).reshape(())
    except (RuntimeError, TypeError, ValueError):
        raise TrainerError(
            f"--custom-loss-function-path: the metric {name!r} is {value!r:.80}; return a number or a tensor of one element"
        ) from None


def _needed(logprobs: Tensor | None, flag: str, whose: str) -> Tensor:
    if logprobs is None:
        raise TrainerError(f"{flag} needs the {whose}'s log-probabilities, but the batch has none; drop {flag}")
    return logprobs


def value_objective(values: Tensor, batch: MicroBatch, clip: float) -> Objective:
    """Compute a micro-batch's share of the step's value loss, with the token weights of the policy loss.

    Metrics: `value_loss`, and `value_clip_fraction`, the share of tokens without gradient.

    Args:
        values: [N] predicted values, with gradient.
        batch: micro-batch with `values` and `returns`.
        clip: largest change from the old values before the loss is clipped; see `value_loss`.
    """
    assert values.dtype == torch.float32, f"values of type {values.dtype}; float32 is needed"
    assert batch.values is not None and batch.returns is not None, "the value model has not scored the batch"
    mask = batch.loss_mask != 0
    trained, old, returns = (torch.where(mask, each, 0.0) for each in (values, batch.values, batch.returns))
    terms = value_loss(trained, old, returns, clip)
    loss = (batch.weights * terms.loss).sum()
    return Objective(loss, MetricSums.of({"value_loss": loss}, {"value_clip_fraction": terms.clipped.float()}, batch.weights))


def value_metrics(samples: Sequence[TrainSample]) -> dict[str, float]:
    """Return `train/value_mean`, `train/return_mean` and `train/explained_variance` of a rollout; empty without a value model."""
    scored = [(sample.values, sample.returns, sample.loss_mask) for sample in samples if sample.values is not None]
    if not scored:
        return {}
    values, returns, masks = zip(*scored, strict=True)
    fit = value_fit(values, returns, masks)
    return {"train/value_mean": fit.value_mean, "train/return_mean": fit.return_mean, "train/explained_variance": fit.explained_variance}
