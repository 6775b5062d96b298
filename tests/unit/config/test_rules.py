"""Every rule is broken once, with everything else as it should be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fuligo.algorithms import estimators
from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config.flags import flags
from fuligo.config.rules import advice, combinations, effects, sizes
from fuligo.config.validate import config_problems, validate
from fuligo.errors import ConfigError
from fuligo.rollout.rewards.rules import NAMED, RULES
from tests.unit.config.conftest import MakeConfig, config_with

BROKEN: dict[str, list[tuple[dict[str, Any], str]]] = {
    "model_is_given": [({"hf_checkpoint": None}, "--hf-checkpoint is missing")],
    "prompts_are_given": [({"prompt_data": None}, "--prompt-data is missing")],
    "length_is_given_once": [
        ({"num_epoch": 2}, "--num-rollout 10 and --num-epoch 2"),
        ({"num_rollout": None}, "give --num-rollout, or --num-epoch"),
        (
            {"num_rollout": None, "num_epoch": 1, "prompt_data": None, "rollout_function_path": "my.rollout"},
            "--num-epoch 1 counts passes over --prompt-data",
        ),
    ],
    "something_judges": [({"rm_type": None}, "--custom-rm-path")],
    "reward_is_known": [
        ({"rm_type": "deepscalr"}, "did you mean deepscaler?"),
        ({"rm_type": "boxed_maths"}, "did you mean boxed_math"),
        ({"rm_type": "gpqa"}, "known: math, deepscaler"),
    ],
    "label_is_given": [({"label_key": None}, "--label-key"), ({"label_key": None, "rm_type": "boxed_math"}, "--label-key")],
    "remote_reward_has_address": [({"rm_type": "remote_rm"}, "--rm-url")],
    "custom_loss_has_function": [({"loss_type": "custom_loss"}, "--custom-loss-function-path")],
    "one_kl_term": [
        ({"kl_coef": 0.1, "kl_loss_coef": 0.2, "use_kl_loss": True, "advantage_estimator": "rloo"}, "--kl-coef 0.1 and --kl-loss-coef 0.2")
    ],
    "advantages_are_whitened": [
        ({"advantage_estimator": "reinforce_plus_plus"}, "needs --normalize-advantages"),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "needs --normalize-advantages"),
    ],
    "one_old_policy": [({"use_tis": True, "use_rollout_logprobs": True}, "give one of them")],
    "trained_parameters_are_named_once": [
        ({"only_train_params_name_list": ["mlp"], "freeze_params_name_list": ["embed"]}, "exclude each other")
    ],
    "parameter_patterns_compile": [({"freeze_params_name_list": ["mlp", "(embed"]}, "'(embed' is not a regular expression")],
    "micro_batches_have_a_limit": [({"use_dynamic_batch_size": True}, "--max-tokens-per-gpu")],
    "eval_data_are_named": [
        ({"eval_prompt_data": ["a", "a.jsonl", "b"]}, "got 3 values"),
        ({"eval_prompt_data": ["a", "a.jsonl", "a", "b.jsonl"]}, "names a more than once"),
    ],
    "one_side_is_debugged": [
        ({"debug_rollout_only": True, "debug_train_only": True, "load_debug_rollout_data": "d/{rollout_id}"}, "exclude each other")
    ],
    "debug_training_has_data": [({"debug_train_only": True}, "--load-debug-rollout-data")],
    "every_rollout_has_its_file": [
        ({"save_hf": "export"}, "--save-hf export is one path for all rollouts"),
        ({"save_debug_rollout_data": "d.npz"}, "{rollout_id}"),
    ],
    "engine_addresses_are_complete": [
        ({"rollout_external_engine_addrs": ["host:30000", "host"]}, "'host' must be host:port"),
        ({"rollout_external_engine_addrs": ["host:port"]}, "'host:port' must be host:port"),
    ],
    "global_batch_divides_rollout": [
        ({"global_batch_size": 100}, "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples): use 64"),
        ({"global_batch_size": 512}, "use at most 256"),
    ],
    "steps_divide_rollout": [({"num_steps_per_rollout": 3}, "--num-steps-per-rollout 3 does not divide")],
    "global_batch_agrees_with_steps": [({"global_batch_size": 64, "num_steps_per_rollout": 2}, "= 128, but")],
    "every_rank_has_a_sample": [({"global_batch_size": 2, "actor_num_gpus_per_node": 4}, "4 trainer processes")],
    "wave_fills_rollout": [({"over_sampling_batch_size": 16}, "use at least 32")],
    "context_has_room": [({"rollout_max_context_len": 100, "rollout_max_prompt_len": 100}, "no room to respond")],
    "cache_holds_a_response": [({"embedded_max_total_tokens": 1024}, "cannot hold one prompt and a response")],
    "top_k_keeps_a_token": [({"rollout_top_k": 0}, "--rollout-top-k 0 keeps no token")],
    "tis_bounds_are_ordered": [({"use_tis": True, "tis_clip_low": 3.0}, "--tis-clip-low 3.0 is above --tis-clip 2.0")],
    "learning_rate_falls": [({"lr_decay_style": "linear", "min_lr": 1.0}, "--min-lr 1.0 is above --lr")],
    "decay_follows_warmup": [
        ({"lr_decay_style": "linear", "lr_decay_iters": 5, "lr_warmup_iters": 5}, "--lr-decay-iters 5 ends before --lr-warmup-iters 5")
    ],
}

ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "truncated_sampling_biases_the_ratio": ({"rollout_top_p": 0.9, "rollout_top_k": 20}, "--rollout-top-p 0.9 and --rollout-top-k 20"),
    "k1_loss_pulls_nowhere": ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "--kl-loss-type k1"),
    "micro_batch_size_is_not_used": (
        {"micro_batch_size": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096},
        "--micro-batch-size 4 is not used",
    ),
    "groups_of_one_teach_nothing": ({"n_samples_per_prompt": 1}, "no advantage"),
    "warmup_outlasts_the_run": ({"lr_warmup_iters": 11}, "more than the run's 10 optimizer steps"),
    "nothing_is_partial": ({"partial_rollout": True}, "it aborts nothing"),
}

NO_EFFECT: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "kl_loss_coef": [(0.1, {})],
    "use_unbiased_kl": [(True, {})],
    "kl_coef": [(0.1, {"advantage_estimator": name}) for name, facts in ESTIMATORS.items() if not facts.uses_kl_coef],
    "gamma": [(0.9, {"advantage_estimator": name}) for name, facts in ESTIMATORS.items() if not facts.uses_gamma],
    "disable_grpo_std_normalization": [(True, {"advantage_estimator": "rloo"}), (True, {"disable_rewards_normalization": True})],
    "eps_clip_c": [(3.0, {"advantage_estimator": "cispo"})],
    "tis_mode": [("icepop", {})],
    "tis_clip": [(3.0, {})],
    "tis_clip_low": [(0.5, {})],
    "custom_tis_function_path": [("my.tis", {})],
    "custom_loss_function_path": [("my.loss", {})],
    "ref_update_interval": [(5, {})],
    "buffer_filter_path": [("my.filter", {}), ("my.filter", {"partial_rollout": True, "data_source_path": "my.Source"})],
    "mask_offpolicy_in_partial_rollout": [(True, {})],
    "max_staleness": [(2, {}), (2, {"partial_rollout": True, "data_source_path": "my.Source"})],
    "rm_type": [("math", {"custom_rm_path": "my.reward"})],
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
    "eval_reward_key": [("acc", {})],
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
    "over_sampling_batch_size": [(64, {"loss_type": "sft_loss"})],
    "dynamic_sampling_filter_path": [("my.filter", {"loss_type": "sft_loss"})],
    "partial_rollout": [(True, {"loss_type": "sft_loss"})],
}


def test_the_valid_config_breaks_no_rule_and_warns_of_nothing(make_config: MakeConfig) -> None:
    assert validate(make_config()) == []


@pytest.mark.parametrize(("rule", "values", "text"), [(rule, *case) for rule, cases in BROKEN.items() for case in cases])
def test_a_broken_rule_is_one_error(make_config: MakeConfig, rule: str, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        validate(make_config(**values))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("rule", "values", "text"), [(rule, *case) for rule, case in ADVICE.items()])
def test_advice_warns_and_stops_nothing(make_config: MakeConfig, rule: str, values: dict[str, Any], text: str) -> None:
    (warning,) = validate(make_config(**values))
    assert text in warning


@pytest.mark.parametrize(("name", "value", "values"), [(name, *case) for name, cases in NO_EFFECT.items() for case in cases])
def test_a_flag_without_effect_is_an_error_unless_its_value_is_neutral(
    make_config: MakeConfig, name: str, value: object, values: dict[str, Any]
) -> None:
    assert any(
        problem.startswith(flags()[name].option) and "no effect" in problem
        for problem in config_problems(make_config(**values, **{name: value}))
    )
    neutral = config_problems(make_config(**{**values, name: flags()[name].default}))
    assert not any(problem.startswith(f"{flags()[name].option} ") and "no effect" in problem for problem in neutral)


def test_every_rule_is_tested() -> None:
    assert set(BROKEN) == {rule.__name__ for rule in [*combinations.RULES, *sizes.RULES]}
    assert set(ADVICE) == {rule.__name__ for rule in advice.RULES}
    assert set(NO_EFFECT) == {name for effect in effects.EFFECTS for name in effect.names}


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
        {"rm_type": "random", "label_key": None},
        {"rm_type": "remote_rm", "rm_url": "http://rm", "rm_retries": 9},
        {"rm_type": None, "custom_rm_path": "my.reward", "group_rm": True},
        {"rm_type": None, "metadata_key": "metadata"},
        {"eval_prompt_data": ["a.jsonl"], "eval_interval": 5, "eval_top_k": 5},
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
def test_combinations_that_are_fine(make_config: MakeConfig, values: dict[str, Any]) -> None:
    assert validate(make_config(**values)) == []


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_with(hf_checkpoint=None, global_batch_size=100, kl_loss_coef=0.1, eval_interval=2))
    assert len(caught.value.problems) == 4


def test_the_table_of_rewards_is_that_of_the_rewards() -> None:
    assert {name: rule.needs_label for name, rule in NAMED.items()} == combinations.NEEDS_LABEL
    assert {*RULES} == {*NAMED, *(f"boxed_{name}" for name in NAMED)}


def test_the_choices_of_estimators_are_those_of_the_algorithms() -> None:
    assert set(flags()["advantage_estimator"].choices) == {*estimators.ESTIMATORS, *estimators.WITH_CRITIC}
