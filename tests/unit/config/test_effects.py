"""Tests of flags without effect: each is an error under every condition that leaves it without one, and its fix mends that."""

from typing import Any

import pytest

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.flags import flags
from fuligo.config.rules import effects
from fuligo.config.validate import findings
from tests.unit.config.conftest import PPO, SGLANG, Values, config_of, config_with

NO_EFFECT: dict[str, list[tuple[Any, Values]]] = {
    "kl_loss_coef": [(0.1, {})],
    "use_unbiased_kl": [(True, {})],
    "sft_rewritten_turns": [("rendered", {})],
    "kl_coef": [(0.1, {"advantage_estimator": name}) for name, facts in ESTIMATORS.items() if not facts.uses_kl_coef],
    "update_weight_requests": [("continue", {}), ("continue", {"async_mode": "one-step"})],
    "gamma": [(0.9, {"advantage_estimator": name}) for name, facts in ESTIMATORS.items() if not facts.uses_gamma],
    "turn_rewards": [
        (True, {"environment": "my.World", "rm_type": None}),
        (True, {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}),
        (True, {"loss_type": "sft_loss"}),
    ],
    "disable_grpo_std_normalization": [(True, {"advantage_estimator": "rloo"}), (True, {"disable_rewards_normalization": True})],
    "eps_clip_c": [(3.0, {"advantage_estimator": "cispo"})],
    "skip_zero_advantages": [
        (True, {"loss_type": "sft_loss"}),
        (True, {"entropy_coef": 0.01}),
        (True, {"use_kl_loss": True, "kl_loss_coef": 0.1}),
        (True, PPO),
        (True, {"custom_pg_loss_reducer_function_path": "my.reduce"}),
        (False, {"entropy_coef": 0.01}),
    ],
    "tis_mode": [("icepop", {})],
    "tis_clip": [(3.0, {})],
    "tis_clip_low": [(0.5, {})],
    "custom_tis_function_path": [("my.tis", {})],
    "tracking_project": [("sums", {})],
    "profile_ranks": [([1], {})],
    "custom_pg_loss_reducer_function_path": [
        ("my.reduce", {"loss_type": "sft_loss"}),
        ("my.reduce", {"loss_type": "custom_loss", "custom_loss_function_path": "my.loss"}),
    ],
    "custom_eval_rollout_log_function_path": [("my.log", {})],
    "rollout_all_samples_process_path": [("my.process", {"loss_type": "sft_loss"})],
    "extra_rm_path": [(["my.reward"], {"loss_type": "sft_loss"})],
    "extra_rm_weights": [([0.5], {})],
    "custom_loss_function_path": [("my.loss", {})],
    "ref_update_interval": [(5, {})],
    "buffer_filter_path": [
        ("my.filter", {}),
        ("my.filter", {"partial_rollout": True, "data_source_path": "my.Source"}),
        ("my.filter", {"partial_rollout": True, "async_mode": "full", "max_staleness": 2}),
    ],
    "mask_offpolicy_in_partial_rollout": [(True, {}), (True, {"partial_rollout": True, "async_mode": "full", "max_staleness": 2})],
    "max_staleness": [(2, {}), (2, {"partial_rollout": True, "data_source_path": "my.Source"})],
    "offload_train": [(False, {}), (True, {"colocate": True, "debug_rollout_only": True, **SGLANG})],
    "exact_on_policy": [(True, {"loss_type": "sft_loss"}), (True, {"debug_rollout_only": True})],
    "max_restarts": [(2, {"debug_rollout_only": True})],
    "save_hf": [("exports/{rollout_id}", {"save_last": False})],
    "push_to_hub": [("acme/model", {"save_last": False, "save_hf": "exports/{rollout_id}"})],
    "async_save": [(True, {"save_last": False}), (True, {"save_last": False, "save_interval": 10, "num_rollout": 9})],
    "rm_type": [("math", {name: "my.hook"}) for name in ("custom_rm_path", "agent", "environment")],
    "custom_rm_path": [("my.reward", {name: "my.hook", "rm_type": None}) for name in ("agent", "environment")],
    "agent": [("my.agent", {"loss_type": "sft_loss"})],
    "agent_timeout_s": [(9.0, {})],
    "agent_sampling": [("replace", {})],
    "agent_host": [("0.0.0.0", {})],
    "environment_settings": [({"level": 2}, {})],
    "environment_isolation": [("none", {})],
    "environment_variables": [(["OPENAI_API_KEY"], {}), (["OPENAI_API_KEY"], {"environment": "my.World", "environment_isolation": "none"})],
    "environment_memory_mb": [(512, {}), (512, {"environment": "my.World", "environment_isolation": "none"})],
    "max_turns": [(2, {})],
    "turn_timeout_s": [(5.0, {})],
    "episode_timeout_s": [(5.0, {})],
    "rm_url": [("http://rm", {})],
    "rm_retries": [(9, {})],
    "rm_num_workers": [(2, {"rm_type": None, "custom_rm_path": "my.reward"})],
    "group_rm": [(True, {})],
    "eval_interval": [(5, {})],
    "n_samples_per_eval_prompt": [(4, {})],
    "eval_max_response_len": [(64, {})],
    "eval_temperature": [(0.6, {})],
    "eval_top_p": [(0.7, {})],
    "eval_top_k": [(5, {})],
    "skip_eval_before_train": [(True, {})],
    "eval_reward_key": [("acc", {}), ("acc", {"eval_prompt_data": ["a.jsonl"]})],
    "max_tokens_per_gpu": [(4096, {})],
    "log_probs_max_tokens_per_gpu": [(4096, {})],
    "min_lr": [(1e-7, {})],
    "lr_decay_iters": [(100, {})],
    "apply_chat_template_kwargs": [({"enable_thinking": False}, {})],
    "tool_key": [("tools", {})],
    "ckpt_step": [(3, {})],
    "embedded_max_running_requests": [(8, {"rollout_external_engine_addrs": ["localhost:30000"]})],
    "embedded_max_total_tokens": [(8192, {"rollout_external_engine_addrs": ["localhost:30000"]})],
    "embedded_dtype": [("bf16", {"rollout_external_engine_addrs": ["localhost:30000"]})],
    "embedded_num_threads": [(1, {"rollout_external_engine_addrs": ["localhost:30000"]})],
    "wandb_project": [("p", {})],
    "wandb_group": [("g", {})],
    "wandb_mode": [("offline", {})],
    "load_debug_rollout_data": [("d/{rollout_id}", {})],
    "save_debug_rollout_data": [("d/{rollout_id}", {"debug_train_only": True, "load_debug_rollout_data": "e/{rollout_id}"})],
    "disable_rewards_normalization": [(True, {"loss_type": "sft_loss"})],
    "normalize_advantages": [(True, {"loss_type": "sft_loss"})],
    "eps_clip": [(0.1, {"loss_type": "sft_loss"})],
    "eps_clip_high": [(0.3, {"loss_type": "sft_loss"})],
    "entropy_coef": [(0.1, {"loss_type": "sft_loss"})],
    "use_kl_loss": [(True, {"loss_type": "sft_loss"})],
    "use_tis": [(True, {"loss_type": "sft_loss"})],
    "use_rollout_logprobs": [(True, {"loss_type": "sft_loss"})],
    "custom_advantage_function_path": [("my.advantages", {"loss_type": "sft_loss"})],
    "custom_reward_post_process_path": [("my.rewards", {"loss_type": "sft_loss"})],
    "over_sampling_batch_size": [(64, {"loss_type": "sft_loss"}), (64, {"async_mode": "full", "max_staleness": 2})],
    "dynamic_sampling_filter_path": [("my.filter", {"loss_type": "sft_loss"})],
    "partial_rollout": [(True, {"loss_type": "sft_loss"})],
    "data_source_path": [("my.Source", {"loss_type": "sft_loss"})],
    "rollout_function_path": [("my.rollout", {"loss_type": "sft_loss"})],
    "rollout_sample_filter_path": [("my.filter", {"loss_type": "sft_loss"})],
    "reward_key": [("acc", {}), ("acc", {"rm_type": "boxed_gpqa"})],
    "lambd": [(0.9, {}), (0.9, {"loss_type": "sft_loss"})],
    "value_clip": [(0.1, {}), (0.1, {"custom_advantage_function_path": "my.advantages"})],
    "num_critic_only_steps": [(5, {}), (5, {**PPO, "loss_type": "sft_loss"})],
    "critic_lr": [(1e-5, {}), (1e-5, {**PPO, "loss_type": "sft_loss"})],
    "critic_lr_warmup_iters": [(5, {}), (5, {**PPO, "loss_type": "sft_loss"})],
    "critic_load": [("values", {}), ("values", {**PPO, "loss_type": "sft_loss"})],
    "use_opsm": [(True, {}), (True, {"use_tis": True}), (True, {"loss_type": "sft_loss"})],
    "opsm_delta": [(1e-3, {})],
    "use_opd": [(True, {"loss_type": "sft_loss"})],
    "opd_type": [("trainer", {})],
    "opd_kl_coef": [(0.5, {})],
    "opd_teacher_load": [("t", {})],
    "opd_teacher_url": [("http://t:1", {})],
    "use_routing_replay": [(True, {**SGLANG, "loss_type": "sft_loss"})],
    "use_rollout_routing_replay": [(True, {**SGLANG, "loss_type": "sft_loss"})],
    "recompute_method": [("uniform", SGLANG), ("uniform", {**SGLANG, "recompute_granularity": "selective"})],
    "recompute_num_layers": [(1, SGLANG)],
    "lora_alpha": [(16.0, {})],
    "lora_dropout": [(0.1, {"loss_type": "sft_loss", "rm_type": None})],
    "lora_target_modules": [(["q_proj"], {})],
    "lora_experts": [(True, {})],
    "lora_use_rslora": [(True, {})],
    "lora_sync": [("merged", {})],
    "lora_base_precision": [("nf4", {})],
    "recompute_modules": [(["mlp"], {**SGLANG, "recompute_granularity": "full"})],
    "accumulate_allreduce_grads_in_fp32": [(True, {**SGLANG, "megatron_grad_reduce_in_bf16": True})],
    "overlap_cpu_optimizer_d2h_h2d": [(True, SGLANG)],
    "mtp_loss_scaling_factor": [(0.3, {**SGLANG, "mtp_num_layers": 1})],
    "mtp_joint_training": [(True, {**SGLANG, "mtp_num_layers": 1})],
    "data_pad_size_multiplier": [(64, {})],
    "override_model_config": [(True, SGLANG)],
    "colocate": [(True, {})],
    "use_fault_tolerance": [(True, {}), (True, {"rollout_backend": "sglang", "rollout_external_engine_addrs": ["host:30000"]})],
    "engine_python": [("/opt/sglang/bin/python", {})],
    "engine_env": [({"A": "1"}, {})],
    "rollout_health_check_interval": [(5.0, {})],
    "rollout_health_check_timeout": [(5.0, {})],
}
"""Flag -> values without effect, and the flags that make them so."""


@pytest.mark.parametrize(("name", "value", "values"), [(name, *case) for name, cases in NO_EFFECT.items() for case in cases])
def test_a_flag_without_effect_is_an_error_unless_its_value_is_neutral(name: str, value: object, values: Values) -> None:
    def idle(config: Config) -> list[str]:
        return [
            finding.id for finding in findings(config) if finding.id.startswith("CFG-NO-EFFECT") and flags()[name].option in finding.flags
        ]

    config = config_of({**values, name: value})
    (found,) = idle(config)
    assert idle(config_of({**values, name: flags()[name].default})) == []
    (finding,) = [finding for finding in findings(config) if finding.id == found]
    assert found not in [left.id for left in findings(apply_changes(config, finding.fix))]


def test_several_flags_without_effect_are_one_finding_for_each_cause() -> None:
    (tis, evaluation) = findings(config_with(tis_clip=3.0, tis_mode="icepop", eval_interval=2))
    assert tis.text == "--tis-mode icepop and --tis-clip 3.0 have no effect without --use-tis"
    assert tis.advice == "to use them, add --use-tis"
    assert evaluation.id == "CFG-NO-EFFECT-EVAL"


def test_a_switch_without_effect_is_named_as_it_was_given() -> None:
    (finding,) = findings(config_with(offload_train=False))
    assert finding.text.startswith("--no-offload-train has no effect")


def test_every_flag_with_a_condition_is_tested() -> None:
    assert set(NO_EFFECT) == {name for effect in effects.EFFECTS for name in effect.names}
