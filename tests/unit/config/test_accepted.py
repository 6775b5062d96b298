"""Valid configs near the bounds of the rules: none is refused, and none gets a warning."""

import pytest

from fuligo.config.validate import validate
from tests.unit.config.conftest import SGLANG, SHARED, WITH_TEACHER, MakeConfig, Values, config_of


def test_the_valid_config_breaks_no_rule_and_warns_of_nothing(make_config: MakeConfig) -> None:
    assert validate(make_config()) == []


@pytest.mark.parametrize(
    "values",
    [
        {"kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"},
        {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"},
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "ref_update_interval": 10},
        {"kl_coef": 0.1, "advantage_estimator": "rloo"},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.99, "kl_coef": 0.1},
        {"kl_coef": 0.1, "custom_advantage_function_path": "my.advantages"},
        {"global_batch_size": 64, "num_steps_per_rollout": 4},
        {"rm_type": "boxed_math"},
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "gspo", "num_steps_per_rollout": 4, "eps_clip": 3e-4, "eps_clip_high": 4e-4},
        {"use_tis": True, "tis_mode": "sequence-mask", "tis_clip_low": 0.99, "tis_clip": 1.01},
        {"rm_type": "dapo", "reward_key": "acc"},
        {"rm_type": "math", "reward_key": "acc", "metadata_key": "metadata"},
        {"rm_type": None, "custom_rm_path": "my.reward", "reward_key": "acc"},
        {"rollout_stop": ["\n", "\\boxed{"]},
        {"rm_type": "boxed_gpqa", "label_key": None, "metadata_key": "metadata"},
        {"rm_type": "ifbench", "label_key": None, "metadata_key": "metadata"},
        {"use_opsm": True, "opsm_delta": 1e-3, "use_rollout_logprobs": True},
        {"use_opsm": True, "use_tis": True, "num_steps_per_rollout": 4},
        {"advantage_estimator": "ppo", "lambd": 0.95, "gamma": 0.99, "kl_coef": 0.1, "value_clip": 0.1},
        {"advantage_estimator": "ppo", "num_critic_only_steps": 2, "critic_lr": 1e-5, "critic_lr_warmup_iters": 2, "critic_load": "values"},
        {"advantage_estimator": "ppo", "custom_advantage_function_path": "my.advantages", "value_clip": 0.1},
        {"lambd": 0.9, "custom_advantage_function_path": "my.advantages"},
        {"async_mode": "full", "max_staleness": 2},
        {"debug_train_only": True, "load_debug_rollout_data": "d/{rollout_id}", "colocate": True},
        SGLANG,
        SHARED,
        {**SHARED, "rollout_num_gpus": 8},
        {**SGLANG, "rollout_external_engine_addrs": ["host:30000"], "rollout_num_gpus": 0},
        {**SGLANG, "update_weight_transport": "nccl"},
        {**SGLANG, "update_weight_transport": "gloo", "device": "cpu"},
        {
            **SHARED,
            "tensor_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"train_backend": "torch", "mtp_num_layers": 1, "enable_mtp_training": True, "mtp_joint_training": True},
        {**SHARED, "mtp_num_layers": 1, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.3, "mtp_joint_training": True},
        {**SGLANG, "use_routing_replay": True, "num_steps_per_rollout": 2},
        {**SGLANG, "use_rollout_routing_replay": True, "use_rollout_logprobs": True, "sglang_speculative_algorithm": "EAGLE"},
        {**SGLANG, "rollout_num_gpus_per_engine": 4, "sglang_dp_size": 2, "sglang_enable_dp_attention": True},
        {**SGLANG, "use_fault_tolerance": True, "rollout_health_check_interval": 5.0, "engine_env": {"A": "1"}},
        {**SGLANG, "rollout_health_check_timeout": 5.0},
        {**SGLANG, "megatron_rotary_base": 10000, "override_model_config": True},
        {"use_opd": True, "opd_teacher_load": "t", "rollout_temperature": 0.8, "opd_kl_coef": 0.5},
        {"use_opd": True, "opd_teacher_url": "http://t:1", "rm_type": None, "n_samples_per_prompt": 1, "eps_clip": 0.1},
        {**WITH_TEACHER, "rm_type": None},
        {"use_opd": True, "opd_teacher_load": "t", "rm_type": None, "eval_config": "eval.yaml"},
        {**WITH_TEACHER, "opd_type": "megatron", "opd_teacher_load": "t"},
        {"rm_type": "random", "label_key": None},
        {"rm_type": "remote_rm", "rm_url": "http://rm", "rm_retries": 9},
        {"rm_type": None, "custom_rm_path": "my.reward", "group_rm": True},
        {"rm_type": None, "metadata_key": "metadata"},
        {"eval_prompt_data": ["a.jsonl"], "eval_interval": 5, "eval_top_k": 5, "eval_top_p": 0.7},
        {"debug_rollout_only": True, "rollout_top_p": 0.9},
        {"eval_config": "eval.yaml", "eval_interval": 5},
        {"eval_config": "eval.yaml", "eval_prompt_data": ["a.jsonl"]},
        {"loss_type": "sft_loss", "rm_type": None, "num_rollout": None, "num_epoch": 3},
        {"partial_rollout": True, "over_sampling_batch_size": 64, "max_staleness": 2, "async_mode": "one-step"},
        {"debug_train_only": True, "load_debug_rollout_data": "d/{rollout_id}", "prompt_data": None, "rm_type": None},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096, "log_probs_max_tokens_per_gpu": 8192},
        {"save_hf": "export", "num_rollout": 1},
        {"actor_num_gpus_per_node": 4, "global_batch_size": 4},
    ],
    ids=" ".join,
)
def test_a_valid_combination_is_accepted_without_a_warning(values: Values) -> None:
    assert validate(config_of(values)) == []
