"""Advantages, importance weights and losses equal those of TRL's own GRPOTrainer and RLOOTrainer on the same tensors.

TRL's code runs as it is, from rewards to the loss; only its generation and its forward pass are replaced by fixed tokens and
log-probabilities.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuligo.algorithms.assign import assign_advantages, step_denominators, token_weights
from fuligo.algorithms.off_policy import Correction
from fuligo.algorithms.policy_loss import Clip
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.trainer.objective import KlLoss, LossSettings, objective
from fuligo.types import TrainSample
from tests import tiny
from tests.random_samples import entropy_stand_in, loss_inputs, random_samples

TRL_EPSILON = 1e-4
"""Epsilon that TRL adds to a standard deviation; ours is set equal here."""
GROUP_SIZE, NUM_GROUPS = 4, 3
NUM_SAMPLES = GROUP_SIZE * NUM_GROUPS


@dataclass
class Rollout:
    """Rollout for both sides."""

    samples: list[TrainSample]
    policy: list[Tensor] = field(init=False)
    """[R] log-probabilities of each sample under the trained policy, a leaf."""

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.policy = [
            (torch.from_numpy(sample.old_logprobs) + 0.3 * torch.randn(sample.response_length)).requires_grad_() for sample in self.samples
        ]


@pytest.fixture(params=[0, 1, 2])
def rollout(request):
    """Return samples of mixed lengths with masked tokens in the middle (like tool output) and at least one trained token."""
    samples = random_samples(request.param, num_groups=NUM_GROUPS, group_size=GROUP_SIZE, max_length=8)
    for sample in samples:
        sample.loss_mask[-1] = 1
        sample.mask_sum = float(sample.loss_mask.sum())
    return Rollout(samples)


def given_reward(completions, **columns):
    return columns["reward"]


def trl_trainer(cls: type, config_cls: type, directory) -> Any:
    """Build a TRL trainer; its tiny model is never run."""
    config = config_cls(
        output_dir=str(directory),
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=NUM_SAMPLES,
        num_iterations=2,  # has TRL keep old log-probabilities
        beta=0.0,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    import datasets

    prompts = datasets.Dataset.from_dict({"prompt": ["1+1="] * NUM_GROUPS})
    trainer = cls(
        model=tiny.model(hidden=16, layers=1),
        reward_funcs=given_reward,
        args=config,
        train_dataset=prompts,
        processing_class=tiny.tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory):
    from trl import GRPOConfig, GRPOTrainer  # only where needed: the import takes seconds

    return trl_trainer(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def rloo_trainer(tmp_path_factory):
    from trl import RLOOConfig, RLOOTrainer

    return trl_trainer(RLOOTrainer, RLOOConfig, tmp_path_factory.mktemp("rloo"))


def padded(values: list[Tensor]) -> Tensor:
    """Pad to [B, T] with 0."""
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def run_trl(trainer: Any, rollout: Rollout, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return TRL's scored batch, its loss, and the loss's gradient at the response tokens, sample by sample."""
    samples, reference = rollout.samples, object()
    for name, value in {"ref_model": reference, **overrides}.items():
        monkeypatch.setattr(trainer.args if name in ("delta", "use_bias_correction_kl") else trainer, name, value)

    def generate(prompts):
        prompt_ids = [sample.tokens[: sample.prompt_length].tolist() for sample in samples]
        completion_ids = [sample.tokens[sample.prompt_length :].tolist() for sample in samples]
        if type(trainer).__name__ == "RLOOTrainer":
            return prompt_ids, completion_ids, [""] * len(samples)
        masks = [sample.loss_mask.tolist() for sample in samples]
        engine = [sample.engine_logprobs.tolist() for sample in samples]
        return prompt_ids, completion_ids, masks, [""] * len(samples), engine, {}, None, None

    def forward(model, *args, compute_entropy=False, **kwargs):
        if compute_entropy:
            return padded(rollout.policy), entropy_stand_in(padded(rollout.policy)), None
        name = "ref_logprobs" if model is reference else "old_logprobs"
        return padded([torch.from_numpy(getattr(sample, name)) for sample in samples]), None, None

    monkeypatch.setattr(trainer, "_generate", generate)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", forward)
    batch = trainer._generate_and_score_completions([{"prompt": "1+1=", "reward": sample.reward} for sample in samples])
    loss = trainer._compute_loss(trainer.model, batch)
    return batch, loss, torch.cat(torch.autograd.grad(loss, rollout.policy))


def run_ours(rollout: Rollout, loss_settings: LossSettings, **advantage_settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the samples' advantages, the loss, and its gradient at the response tokens, sample by sample."""
    settings = AdvantageSettings(samples_per_step=NUM_SAMPLES, std_epsilon=TRL_EPSILON, **advantage_settings)
    batch = assign_advantages(rollout.samples, settings)
    denominators = step_denominators(batch, 0)
    weights = [token_weights(sample, denominators, per_token=loss_settings.per_token) for sample in batch.samples]
    loss = objective(loss_inputs(batch.samples, rollout.policy, weights), loss_settings).loss
    advantages = torch.tensor([sample.advantages[0] for sample in batch.samples])
    return advantages, loss, torch.cat(torch.autograd.grad(loss, rollout.policy))


CLIP_HIGHER = {"epsilon_low": 0.2, "epsilon_high": 0.28}
ENGINE = {
    "use_vllm": True,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_clip_min": 0.9,
    "vllm_importance_sampling_clip_max": 1.1,
}
ENTROPY = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": False, "entropy_coef": 0.05}
VARIANTS: dict[str, tuple[dict[str, Any], LossSettings]] = {
    "grpo": ({"loss_type": "grpo"}, LossSettings(clip=Clip(0.2, 0.2))),
    "grpo, clip-higher": ({"loss_type": "grpo", **CLIP_HIGHER}, LossSettings(clip=Clip(0.2, 0.28))),
    "grpo, dual clip": ({"loss_type": "grpo", "delta": 1.3}, LossSettings(clip=Clip(0.2, 0.2, dual=1.3))),
    "dapo": ({"loss_type": "dapo", **CLIP_HIGHER}, LossSettings(clip=Clip(0.2, 0.28), per_token=True)),
    "bnpo": ({"loss_type": "bnpo"}, LossSettings(clip=Clip(0.2, 0.2), per_token=True)),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
        LossSettings(estimator="gspo", clip=Clip(0.05, 0.08)),
    ),
    "cispo": (
        # TRL bounds the weight above only, by epsilon_high itself; ours, as the paper's, is 1 + high.
        {"loss_type": "cispo", "epsilon_high": 1.2},
        LossSettings(estimator="cispo", clip=Clip(low=1.0, high=0.2), per_token=True),
    ),
    "k3 loss": ({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, LossSettings(kl_loss=KlLoss(0.1, "k3"))),
    "unbiased k3 loss": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        LossSettings(kl_loss=KlLoss(0.1, "k3", unbiased=True)),
    ),
    "entropy bonus": ({"loss_type": "dapo", **ENTROPY}, LossSettings(entropy_coef=0.05, per_token=True)),
    "truncated importance weights": (
        {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_truncate", **ENGINE},
        LossSettings(correction=Correction("truncate", 0.9, 1.1)),
    ),
    "masked importance weights": (
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_mask", **ENGINE},
        LossSettings(correction=Correction("icepop", 0.9, 1.1), per_token=True),
    ),
    "importance weights beside KL": (
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True, "vllm_importance_sampling_mode": "token_truncate", **ENGINE},
        LossSettings(kl_loss=KlLoss(0.1, "k3", unbiased=True), correction=Correction("truncate", 0.9, 1.1), per_token=True),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_advantages_loss_and_gradient_equal_grpo_trainers(name, rollout, grpo_trainer, monkeypatch):
    trl_settings, our_settings = VARIANTS[name]
    scored, trl_loss, trl_gradient = run_trl(grpo_trainer, rollout, monkeypatch, **trl_settings)
    advantages, loss, gradient = run_ours(rollout, our_settings)
    torch.testing.assert_close(advantages, scored["advantages"])
    torch.testing.assert_close(loss, trl_loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, trl_gradient, rtol=1e-5, atol=1e-7)


def test_the_variants_differ_on_these_tensors(rollout):
    """Bounds, weights and terms all take effect, so no variant is trivially equal to another."""
    losses = [round(run_ours(rollout, our_settings)[1].item(), 6) for _, our_settings in VARIANTS.values()]
    assert len(set(losses)) == len(losses)


def test_advantages_without_division_by_the_deviation(rollout, grpo_trainer, monkeypatch):
    scored, _, _ = run_trl(grpo_trainer, rollout, monkeypatch, scale_rewards="none")
    torch.testing.assert_close(run_ours(rollout, LossSettings(), divide_by_std=False)[0], scored["advantages"])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_leave_one_out_advantages_equal_rloo_trainers(beta, rollout, rloo_trainer, monkeypatch):
    for sample in rollout.samples:  # RLOOTrainer does not support masked tokens
        sample.loss_mask[:] = 1
        sample.mask_sum = float(sample.response_length)
    scored, _, _ = run_trl(rloo_trainer, rollout, monkeypatch, beta=beta)
    torch.testing.assert_close(run_ours(rollout, LossSettings(), estimator="rloo", kl_coef=beta)[0], scored["advantages"])


def test_the_sequence_mask_leaves_out_the_samples_that_grpo_trainers_does(grpo_trainer, monkeypatch):
    """TRL bounds the product of a sample's ratios, ours their geometric mean: for samples of equal length L, bounds ** (1 / L)."""
    samples = random_samples(0, num_groups=NUM_GROUPS, group_size=GROUP_SIZE)
    rng = np.random.default_rng(0)
    for sample in samples:
        sample.tokens = np.arange(2 + 4, dtype=np.int32)
        sample.loss_mask, sample.mask_sum = np.ones(4, np.int8), 4.0
        sample.old_logprobs, sample.engine_logprobs, sample.ref_logprobs = -1 + 0.3 * rng.standard_normal((3, 4)).astype(np.float32)
    rollout = Rollout(samples)
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}
    overrides = {**ENGINE, **bounds, "vllm_importance_sampling_mode": "sequence_mask", "loss_type": "grpo"}
    scored, _, _ = run_trl(grpo_trainer, rollout, monkeypatch, **overrides)
    ours = LossSettings(correction=Correction("sequence-mask", 0.5 ** (1 / 4), 2.0 ** (1 / 4)), clip=Clip(9, 9))
    _, _, gradient = run_ours(rollout, ours)
    kept = gradient.view(NUM_SAMPLES, 4).abs().sum(1) > 0
    assert kept.any() and not kept.all()
    assert kept.tolist() == (scored["importance_sampling_ratio"] > 0).flatten().tolist()
