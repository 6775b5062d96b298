"""Objective of a micro-batch: its sums, and their independence of how a step is split."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.algorithms.assign import assign_advantages, step_denominators, token_weights
from fuligo.algorithms.off_policy import Correction
from fuligo.algorithms.policy_loss import Clip, ppo_loss
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.trainer.metric_sums import mean_of_steps
from fuligo.trainer.objective import KlLoss, LossSettings, objective
from tests.random_samples import loss_inputs, random_samples

VARIANTS = {
    "ppo": LossSettings(),
    "everything": LossSettings(
        clip=Clip(0.1, 0.3, 1.5), entropy_coef=0.01, kl_loss=KlLoss(0.1, "k3", unbiased=True), correction=Correction("truncate", 0.5, 2.0)
    ),
    "gspo": LossSettings(estimator="gspo", clip=Clip(0.05, 0.05), correction=Correction("sequence-mask", 0.9, 1.1)),
    "cispo": LossSettings(estimator="cispo", kl_loss=KlLoss(0.1, "low_var_kl"), correction=Correction("icepop", 0.8, 1.2)),
    "rollout logprobs": LossSettings(old_from_engine=True),
    "per token": LossSettings(per_token=True),
    "off-policy sequence masking": LossSettings(estimator="gspo", clip=Clip(9, 9), opsm_delta=0.01),
    "sft": LossSettings(loss_type="sft_loss"),
}


class Step:
    """One optimizer step over twelve random samples, whose policy is one leaf tensor for each sample."""

    def __init__(self, seed: int, per_token: bool = False) -> None:
        batch = assign_advantages(random_samples(seed), AdvantageSettings(samples_per_step=12))
        denominators = step_denominators(batch, 0)
        self.samples = batch.samples
        self.weights = [token_weights(sample, denominators, per_token=per_token) for sample in batch.samples]
        torch.manual_seed(seed)
        self.policy = [
            (torch.from_numpy(sample.old_logprobs) + 0.2 * torch.randn(sample.response_length)).requires_grad_() for sample in batch.samples
        ]

    def inputs(self, positions):
        return loss_inputs([self.samples[i] for i in positions], [self.policy[i] for i in positions], [self.weights[i] for i in positions])

    def run(self, micro_batches, loss_settings):
        """Return loss, metrics and gradient of the step split into these lists of positions."""
        objectives = [objective(self.inputs(positions), loss_settings) for positions in micro_batches]
        loss = torch.stack([result.loss for result in objectives]).sum()
        sums = objectives[0].sums
        for result in objectives[1:]:
            sums = sums + result.sums
        gradient = torch.cat(torch.autograd.grad(loss, self.policy))
        return loss, sums.means(), gradient


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), random=st.randoms(), data=st.data())
def test_packing_micro_batches_and_order_change_neither_gradient_nor_metrics(name, seed, random, data):
    loss_settings = VARIANTS[name]
    step = Step(seed, loss_settings.per_token)
    order = list(range(12))
    whole_loss, whole_metrics, whole_gradient = step.run([order], loss_settings)
    random.shuffle(order)
    cuts = sorted(data.draw(st.sets(st.integers(1, 11))))
    loss, metrics, gradient = step.run([order[a:b] for a, b in zip([0, *cuts], [*cuts, 12])], loss_settings)
    assert (gradient - whole_gradient).abs().max() <= 1e-6 * whole_gradient.abs().max()
    assert loss.item() == pytest.approx(whole_loss.item(), rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


def test_the_loss_is_the_weighted_sum_of_its_terms():
    step = Step(0)
    inputs = step.inputs(range(12))
    clip = Clip(0.1, 0.2)
    loss_settings = LossSettings(clip=clip, entropy_coef=0.3, kl_loss=KlLoss(0.7, "k2"), correction=Correction("truncate", 0, 1.1))
    w, mask = inputs.weights, inputs.loss_mask
    assert inputs.old_logprobs is not None and inputs.ref_logprobs is not None and inputs.engine_logprobs is not None
    pg = ppo_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, clip).loss
    tis = (inputs.old_logprobs - inputs.engine_logprobs).exp().clamp(max=1.1)
    kl = (inputs.logprobs - inputs.ref_logprobs) ** 2 / 2
    result = objective(inputs, loss_settings)
    torch.testing.assert_close(result.loss, (w * mask * (pg * tis - 0.3 * inputs.entropy + 0.7 * kl)).sum())
    means = result.sums.means()
    assert means["loss"] == pytest.approx(means["pg_loss"] - 0.3 * means["entropy_loss"] + 0.7 * means["kl_loss"], rel=1e-5)


@pytest.mark.parametrize("from_engine", [False, True])
def test_the_reverse_kl_to_a_teacher_is_measured_and_no_part_of_the_loss(from_engine):
    """The advantages already include it."""
    inputs = Step(0).inputs(range(12))
    teacher = torch.randn_like(inputs.loss_mask).masked_fill(inputs.loss_mask == 0, float("nan"))
    loss_settings = LossSettings(old_from_engine=from_engine)
    result, without = objective(replace(inputs, teacher_logprobs=teacher), loss_settings), objective(inputs, loss_settings)
    old = inputs.engine_logprobs if from_engine else inputs.old_logprobs
    assert old is not None
    trained, weights = inputs.loss_mask != 0, inputs.weights
    mean = (weights * (old - teacher))[trained].sum() / weights[trained].sum()
    assert result.sums.means()["opd_reverse_kl"] == pytest.approx(mean.item(), rel=1e-5)
    assert torch.equal(result.loss, without.loss)
    assert "opd_reverse_kl" not in without.sums.means()


def test_kl_and_entropy_count_trained_tokens_only():
    """Values at masked tokens (tool output; no log-probability at all) reach neither loss, gradient nor metrics."""
    step = Step(3)
    inputs = step.inputs(range(12))
    masked = inputs.loss_mask == 0
    assert masked.any()
    for variant in VARIANTS.values():
        clean = objective(inputs, variant)
        garbage = {
            field: getattr(inputs, field).detach().clone().masked_fill(masked, float("nan"))
            for field in ("entropy", "advantages", "engine_logprobs", "old_logprobs", "ref_logprobs")
        }
        dirty = objective(replace(inputs, **garbage), variant)
        torch.testing.assert_close(dirty.loss, clean.loss, atol=0, rtol=0)
        assert dirty.sums.means() == clean.sums.means()
        gradient = torch.cat(torch.autograd.grad(dirty.loss, step.policy))
        assert gradient.isfinite().all()
        assert (gradient[masked] == 0).all()


def test_without_old_log_probabilities_the_ratio_is_one_and_the_gradient_that_of_the_policy_gradient():
    step = Step(1)
    inputs = replace(step.inputs(range(12)), old_logprobs=None)
    result = objective(inputs, LossSettings())
    gradient = torch.cat(torch.autograd.grad(result.loss, step.policy))
    torch.testing.assert_close(gradient, -inputs.weights * inputs.advantages)
    means = result.sums.means()
    assert means["ratio_mean"] == pytest.approx(1)
    assert means["clip_fraction"] == 0


def test_means_are_over_what_is_trained_and_the_loss_over_all_samples():
    """If half of the samples are fully masked, the loss halves; the mean ratio of the others does not."""
    step = Step(1)
    inputs = replace(step.inputs(range(12)), old_logprobs=None)
    first_half = inputs.sample_ids < 6
    halved = replace(inputs, loss_mask=inputs.loss_mask * first_half, advantages=torch.ones_like(inputs.advantages))
    means = objective(halved, LossSettings()).sums.means()
    assert means["loss"] == pytest.approx(-(inputs.weights * first_half).sum().item())
    assert -means["loss"] < 0.6
    assert means["ratio_mean"] == pytest.approx(1)


def test_importance_weights_need_no_old_log_probabilities_where_there_is_one_step():
    step = Step(1)
    inputs = step.inputs(range(12))
    correction = LossSettings(correction=Correction())
    explicit = objective(replace(inputs, old_logprobs=inputs.logprobs.detach()), correction)
    implicit = objective(replace(inputs, old_logprobs=None), correction)
    torch.testing.assert_close(implicit.loss, explicit.loss, atol=0, rtol=0)


def test_rollout_logprobs_stand_in_for_the_old_policy():
    inputs = Step(2).inputs(range(12))
    ours = objective(inputs, LossSettings(old_from_engine=True))
    same = objective(replace(inputs, old_logprobs=inputs.engine_logprobs), LossSettings())
    torch.testing.assert_close(ours.loss, same.loss, atol=0, rtol=0)
    with pytest.raises(TrainerError, match="--use-rollout-logprobs needs the engine's log-probabilities"):
        objective(replace(inputs, engine_logprobs=None), LossSettings(old_from_engine=True))


def test_the_importance_weight_multiplies_only_the_policy_gradient_and_has_no_gradient():
    step = Step(4)
    inputs = replace(step.inputs(range(12)), old_logprobs=None)
    loss_settings = LossSettings(entropy_coef=0.1, kl_loss=KlLoss(0.1, "k3"))
    without = torch.cat(torch.autograd.grad(objective(inputs, loss_settings).loss, step.policy, retain_graph=True))
    doubled = replace(loss_settings, custom_weights=lambda batch, old: torch.full_like(old, 2.0))
    with_weight = torch.cat(torch.autograd.grad(objective(inputs, doubled).loss, step.policy))
    torch.testing.assert_close(with_weight - without, -inputs.weights * inputs.advantages, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("from_engine", [False, True])
def test_opsm_masks_bad_samples_far_from_the_old_policy(from_engine):
    """Compared with the definition, sample by sample; entropy and KL still count for all samples."""
    step, delta = Step(6), 0.01
    inputs = step.inputs(range(12))
    loss_settings = LossSettings(entropy_coef=0.1, kl_loss=KlLoss(0.1, "k3"), clip=Clip(9, 9), old_from_engine=from_engine)
    plain, masking = objective(inputs, loss_settings), objective(inputs, replace(loss_settings, opsm_delta=delta))
    expected, share = plain.loss.item(), 0.0
    for sample, policy, weights in zip(step.samples, step.policy, step.weights):
        old, trained = sample.engine_logprobs if from_engine else sample.old_logprobs, np.flatnonzero(sample.loss_mask)
        ratios = np.exp(policy.detach().numpy().astype(np.float64) - old)
        if len(trained) and -np.log(ratios[trained]).mean() > delta:
            for t in trained[sample.advantages[trained] < 0]:
                expected -= weights[t] * -ratios[t] * sample.advantages[t]
                share += weights[t] / sum(each.sum() for each in step.weights)
    assert 0.1 < share < 0.6
    assert masking.loss.item() == pytest.approx(expected, rel=1e-5)
    assert masking.sums.means()["opsm_masked_fraction"] == pytest.approx(share, rel=1e-5)
    assert masking.sums.means()["kl_loss"] == plain.sums.means()["kl_loss"]


def test_opsm_masks_nothing_in_the_rollouts_only_step():
    inputs = replace(Step(6).inputs(range(12)), old_logprobs=None)
    assert objective(inputs, LossSettings(opsm_delta=0.0)).sums.means()["opsm_masked_fraction"] == 0


def test_logprob_abs_diff_compares_the_trainer_before_the_rollouts_first_step_with_the_engine():
    inputs = Step(5).inputs(range(12))
    assert inputs.old_logprobs is not None and inputs.engine_logprobs is not None
    expected = (inputs.weights * (inputs.old_logprobs - inputs.engine_logprobs).abs()).sum() / inputs.weights.sum()
    assert objective(inputs, LossSettings()).sums.means()["logprob_abs_diff"] == pytest.approx(expected.item(), rel=1e-5)


def test_sft_is_the_negative_log_likelihood():
    step = Step(0, per_token=True)
    inputs = step.inputs(range(12))
    trained = torch.cat(step.policy)[inputs.loss_mask != 0]
    torch.testing.assert_close(objective(inputs, LossSettings(loss_type="sft_loss")).loss, -trained.mean())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_micro_batch_with_nothing_to_train_gives_zero_and_a_zero_gradient(name):
    step = Step(0)
    inputs = replace(step.inputs(range(2)), loss_mask=torch.zeros(len(step.inputs(range(2)).logprobs)))
    result = objective(inputs, VARIANTS[name])
    assert result.loss.item() == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(result.loss, step.policy[:2]))
    assert all(value == 0 for value in result.sums.means().values())


def test_a_custom_loss_gets_the_batch_and_the_log_probabilities():
    def squared(batch, logprobs):
        value = (batch.weights * logprobs.square()).sum()
        return value, {"square": value.detach(), "half": 0.5}

    step = Step(0)
    result = objective(step.inputs(range(12)), LossSettings(loss_type="custom_loss", custom_loss=squared))
    gradient = torch.cat(torch.autograd.grad(result.loss, step.policy))
    torch.testing.assert_close(gradient, step.inputs(range(12)).weights * 2 * torch.cat(step.policy).detach())
    means = result.sums.means()
    assert means["square"] == means["loss"] == pytest.approx(result.loss.item())
    assert means["half"] == 0.5


def test_a_custom_loss_gets_the_old_log_probabilities_after_one_step_per_rollout_too():
    inputs = replace(Step(0).inputs(range(12)), old_logprobs=None)

    def loss(batch, logprobs):
        assert torch.equal(batch.old_logprobs, logprobs)
        assert not batch.old_logprobs.requires_grad
        return logprobs.sum(), {}

    objective(inputs, LossSettings(loss_type="custom_loss", custom_loss=loss))


def test_a_metric_named_max_is_a_maximum_over_micro_batches_and_steps():
    """Negative values too: a maximum of sums, or with 0, would differ."""

    def loss(batch, logprobs):
        return logprobs.sum(), {"deepest_max": logprobs.max().detach(), "count": float(len(logprobs))}

    step = Step(0)
    settings = LossSettings(loss_type="custom_loss", custom_loss=loss)
    whole, split = step.run([list(range(12))], settings)[1], step.run([[0, 1, 2], [3, 4], list(range(5, 12))], settings)[1]
    assert split["deepest_max"] == whole["deepest_max"] == pytest.approx(max(p.max().item() for p in step.policy))
    assert split["count"] == whole["count"]
    assert mean_of_steps([{"x_max": -3.0, "x": 1.0}, {"x_max": -1.0, "x": 3.0}]) == {"x_max": -1.0, "x": 2.0}


def own_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Reduce like the default without a hook."""

    def reduce(values):
        parts = zip(values.split(response_lengths), loss_masks, strict=True)
        sums = [((x * mask).sum(), mask.sum().clamp(min=1)) for x, mask in parts]
        return torch.stack([total if calculate_per_token_loss else total / count for total, count in sums]).sum()

    return reduce


def reduced_inputs(step: Step, positions, *, per_token: bool):
    samples = [step.samples[i] for i in positions]
    counted = sum(int(sample.loss_mask.sum()) for sample in step.samples)
    return replace(
        step.inputs(positions),
        share=1 / (counted if per_token else 12),
        response_lengths=[sample.response_length for sample in samples],
        total_lengths=[len(sample.tokens) for sample in samples],
    )


@pytest.mark.parametrize("per_token", [False, True])
def test_a_reducer_that_takes_the_usual_mean_changes_nothing(per_token):
    step = Step(2, per_token)
    usual = objective(reduced_inputs(step, range(12), per_token=per_token), LossSettings(per_token=per_token))
    reduced = objective(reduced_inputs(step, range(12), per_token=per_token), LossSettings(per_token=per_token, reducer=own_mean))
    torch.testing.assert_close(reduced.loss, usual.loss)


def test_a_reducer_may_divide_by_a_constant():
    """Dr. GRPO: the sum over a response's tokens, divided by a constant instead of their number."""
    step = Step(2)
    inputs = reduced_inputs(step, range(12), per_token=False)
    result = objective(inputs, LossSettings(clip=Clip(9, 9), reducer=lambda *_: lambda values: values.sum() / 100))
    expected = -(inputs.loss_mask * (inputs.logprobs - inputs.old_logprobs).exp() * inputs.advantages).sum() / 100 / 12
    torch.testing.assert_close(result.loss, expected)
    with pytest.raises(TrainerError, match=r"--custom-pg-loss-reducer-function-path: the reducer returned tensor"):
        objective(inputs, LossSettings(reducer=lambda *_: lambda values: values))
    with pytest.raises(TrainerError, match=r"--custom-pg-loss-reducer-function-path returned None; return a function"):
        objective(inputs, LossSettings(reducer=lambda *_: None))


def test_metrics_of_a_custom_loss_are_added_by_name():
    """The function's dict may have any order; a metric that is sometimes missing would be added to another."""
    inputs = Step(0).inputs(range(12))

    def sums(**metrics: float):
        settings = LossSettings(loss_type="custom_loss", custom_loss=lambda batch, logprobs: (logprobs.sum() * 0, metrics))
        return objective(inputs, settings).sums

    means = (sums(high=1.0, low=10.0) + sums(low=20.0, high=2.0)).means()
    assert (means["high"], means["low"]) == (3.0, 30.0)
    with pytest.raises(TrainerError, match="the metrics high, loss for one micro-batch and low, loss for another"):
        _ = sums(high=1.0) + sums(low=1.0)


def test_hooks_that_return_something_else_are_named():
    inputs = Step(0).inputs(range(12))
    with pytest.raises(TrainerError, match=r"--custom-loss-function-path returned a loss of the shape \(2,\)"):
        objective(inputs, LossSettings(loss_type="custom_loss", custom_loss=lambda batch, logprobs: (logprobs[:2], {})))
    with pytest.raises(TrainerError, match="requires_grad=False"):
        objective(inputs, LossSettings(loss_type="custom_loss", custom_loss=lambda batch, logprobs: (logprobs.detach().sum(), {})))
    for result in (3.0, (3.0, {}), (logprobs_sum := torch.ones((), requires_grad=True)), (logprobs_sum, None)):
        with pytest.raises(TrainerError, match=r"--custom-loss-function-path must return \(loss, metrics\), a tensor and a dict"):
            objective(inputs, LossSettings(loss_type="custom_loss", custom_loss=lambda batch, logprobs, result=result: result))
    for metric in (torch.zeros(2), "high"):
        with pytest.raises(TrainerError, match=r"--custom-loss-function-path: the metric 'x' is"):
            objective(inputs, LossSettings(loss_type="custom_loss", custom_loss=lambda _, logprobs, x=metric: (logprobs.sum(), {"x": x})))
    with pytest.raises(TrainerError, match=r"--custom-tis-function-path returned None; return a tensor with one weight for each"):
        objective(inputs, LossSettings(custom_weights=lambda batch, old: None))
    with pytest.raises(TrainerError, match=r"--custom-tis-function-path returned weights of the shape \(3,\)"):
        objective(inputs, LossSettings(custom_weights=lambda batch, old: torch.ones(3)))


def test_log_probabilities_of_half_precision_are_refused():
    inputs = Step(0).inputs(range(12))
    with pytest.raises(AssertionError, match=r"torch\.bfloat16; float32 is needed"):
        objective(replace(inputs, logprobs=inputs.logprobs.bfloat16()), LossSettings())


def test_a_reference_that_only_shapes_rewards_is_still_measured():
    means = objective(Step(0).inputs(range(12)), LossSettings()).sums.means()
    assert "kl" in means
    assert "kl_loss" not in means
