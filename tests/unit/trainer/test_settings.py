"""Settings of samples, advantages and loss for given flags."""

import pickle
import sys
from dataclasses import fields

import pytest
import torch

from fuligo.algorithms.off_policy import Correction
from fuligo.algorithms.policy_loss import Clip
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.config import Config
from fuligo.errors import TrainerError
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.samples import SampleSettings
from fuligo.trainer.settings import advantage_settings, loss_settings, sample_settings


def test_the_defaults_are_plain_grpo():
    config = Config()
    assert sample_settings(config) == SampleSettings()
    assert advantage_settings(config) == AdvantageSettings(samples_per_step=32 * 8)
    assert loss_settings(config) == LossSettings()


def test_every_flag_reaches_its_setting():
    config = Config.model_validate(
        {
            "algorithm": {
                "advantage_estimator": "gspo",
                "disable_grpo_std_normalization": True,
                "normalize_advantages": True,
                "gamma": 0.9,
                "turn_rewards": True,
                "lambd": 0.8,
                "eps_clip": 0.1,
                "eps_clip_high": 0.3,
                "eps_clip_c": 3.0,
                "entropy_coef": 0.01,
                "use_kl_loss": True,
                "kl_loss_coef": 0.2,
                "kl_loss_type": "k3",
                "use_unbiased_kl": True,
                "kl_coef": 0.4,
                "calculate_per_token_loss": True,
                "use_tis": True,
                "tis_mode": "icepop",
                "tis_clip": 3.0,
                "tis_clip_low": 0.5,
                "use_opsm": True,
                "opsm_delta": 1e-3,
                "disable_rewards_normalization": True,
                "use_rollout_logprobs": True,
                "use_opd": True,
                "opd_type": "engine",
                "opd_teacher_url": "http://teacher:1",
                "opd_kl_coef": 0.7,
                "use_rollout_routing_replay": True,
            },
            "reward": {"reward_key": "acc"},
            "train": {"num_steps_per_rollout": 4},
        }
    )
    assert sample_settings(config) == SampleSettings(reward_key="acc", needs_routing=True, needs_teacher=True)
    assert advantage_settings(config) == AdvantageSettings(
        samples_per_step=64,
        num_steps=4,
        estimator="gspo",
        normalize_rewards=False,
        divide_by_std=False,
        whiten=True,
        gamma=0.9,
        rewards_by_turn=True,
        lambd=0.8,
        kl_coef=0.4,
        kl_type="k3",
        old_from_engine=True,
        distillation=0.7,
    )
    assert loss_settings(config) == LossSettings(
        estimator="gspo",
        clip=Clip(0.1, 0.3, 3.0),
        entropy_coef=0.01,
        kl_loss=KlLoss(0.2, "k3", unbiased=True),
        correction=Correction("icepop", 0.5, 3.0),
        opsm_delta=1e-3,
        old_from_engine=True,
        per_token=True,
    )

    hooks, elsewhere = {"post_process", "custom", "custom_loss", "custom_weights", "reducer"}, {"has_rewards", "loss_type", "std_epsilon"}
    for given, default in (
        (sample_settings(config), SampleSettings()),
        (advantage_settings(config), AdvantageSettings(samples_per_step=256)),
        (loss_settings(config), LossSettings()),
    ):
        names = {field.name for field in fields(given)} - hooks - elsewhere
        assert {name for name in names if getattr(given, name) == getattr(default, name)} == set(), "no flag was given for these"


def test_a_reward_hook_replaces_normalization(tmp_path):
    (tmp_path / "rewards.py").write_text("def processed(args, samples):\n    return [], []\n")
    reward = {"custom_reward_post_process_path": f"{tmp_path}/rewards.py:processed"}
    settings = advantage_settings(Config.model_validate({"reward": reward, "algorithm": {"normalize_advantages": True}}))
    assert not settings.normalize_rewards and settings.whiten


def test_supervised_samples_are_not_rewarded():
    config = Config.model_validate({"algorithm": {"loss_type": "sft_loss"}})
    assert not sample_settings(config).has_rewards
    assert loss_settings(config).loss_type == "sft_loss"


def test_a_hook_in_a_file_gets_args_and_reaches_another_process(tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text("def scaled(args, batch, logprobs):\n    return args.lr * logprobs.sum(), {}\n")
    algorithm = {"loss_type": "custom_loss", "custom_loss_function_path": f"{file}:scaled"}
    settings = loss_settings(Config.model_validate({"algorithm": algorithm, "optimizer": {"lr": 0.5}}))
    message = pickle.dumps(settings)
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(file)]:
        del sys.modules[name]
    for copy in (settings, pickle.loads(message)):
        assert copy.custom_loss is not None
        loss, _ = copy.custom_loss(None, torch.ones(4))
        assert loss == 2.0


def test_a_hook_that_raises_is_named_by_flag_and_line(tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text("import json\n\n\ndef broken(args, batch, logprobs):\n    return json.loads('{'), {}\n")
    algorithm = {"loss_type": "custom_loss", "custom_loss_function_path": f"{file}:broken"}
    loss = loss_settings(Config.model_validate({"algorithm": algorithm})).custom_loss
    assert loss is not None
    with pytest.raises(TrainerError, match=r"--custom-loss-function-path raised JSONDecodeError: .* \(my_loss\.py:5\)$"):
        loss(None, torch.ones(4))
