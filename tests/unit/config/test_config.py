from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change, Severity
from fuligo.config.validate import findings
from tests.unit.config.conftest import PPO, MakeConfig, config_with


@given(
    prompts=st.integers(1, 64),
    responses=st.integers(1, 16),
    size=st.none() | st.integers(1, 1024),
    steps=st.none() | st.integers(1, 64),
)
def test_valid_batch_sizes_multiply_out(prompts: int, responses: int, size: int | None, steps: int | None) -> None:
    config = config_with(rollout_batch_size=prompts, n_samples_per_prompt=responses, global_batch_size=size, num_steps_per_rollout=steps)
    total = prompts * responses
    fits = total % (size or 1) == 0 and total % (steps or 1) == 0 and (size is None or steps is None or size * steps == total)
    assert (not [found for found in findings(config) if found.severity is Severity.ERROR]) == fits
    if fits:
        assert config.resolved_global_batch_size * config.resolved_num_steps_per_rollout == config.samples_per_rollout == total
        assert config.resolved_global_batch_size == (size or config.resolved_global_batch_size)
        assert config.resolved_num_steps_per_rollout == (steps or config.resolved_num_steps_per_rollout)


def test_supervised_samples_are_the_prompts(make_config: MakeConfig) -> None:
    assert make_config(loss_type="sft_loss", rollout_batch_size=16).samples_per_rollout == 16


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, False),
        ({"use_kl_loss": True}, True),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, True),
        ({"kl_coef": 0.1, "advantage_estimator": "rloo"}, True),
        ({"ref_load": "models/other"}, False),
    ],
)
def test_the_reference_is_loaded_exactly_when_a_kl_needs_it(make_config: MakeConfig, values: dict[str, Any], needed: bool) -> None:
    assert make_config(**values).needs_reference is needed


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, False),
        ({"use_tis": True}, False),
        ({"num_steps_per_rollout": 2}, True),
        ({"global_batch_size": 64}, True),
        ({"num_steps_per_rollout": 2, "use_rollout_logprobs": True}, False),
        ({"kl_coef": 0.1, "advantage_estimator": "rloo"}, True),
        ({"kl_coef": 0.1, "advantage_estimator": "rloo", "use_rollout_logprobs": True}, False),
        ({"use_opd": True, "opd_teacher_load": "t"}, True),
        ({"use_opd": True, "opd_teacher_load": "t", "use_rollout_logprobs": True}, False),
        ({"loss_type": "sft_loss", "rm_type": None, "num_steps_per_rollout": 2}, False),
    ],
)
def test_old_logprobs_are_computed_when_a_later_step_or_the_rewards_need_them(
    make_config: MakeConfig, values: dict[str, Any], needed: bool
) -> None:
    assert make_config(**values).needs_old_logprobs is needed


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({"opd_teacher_load": "t"}, None),
        ({"use_opd": True, "opd_teacher_load": "t"}, "trainer"),
        ({"use_opd": True, "opd_teacher_url": "http://t:1"}, "engine"),
        ({"use_opd": True, "sglang_config": [{"name": "teacher", "model_path": "t", "server_groups": [{"num_gpus": 1}]}]}, "engine"),
        ({"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "t"}, "trainer"),
        ({"use_opd": True, "opd_type": "sglang", "opd_teacher_url": "http://t:1"}, "engine"),
    ],
)
def test_the_teacher_is_asked_where_it_is(make_config: MakeConfig, values: dict[str, Any], source: str | None) -> None:
    assert make_config(**values).teacher_from == source


def test_evaluation_inherits_the_rollouts_sampling(make_config: MakeConfig) -> None:
    rollout = {"rollout_temperature": 0.8, "rollout_top_p": 0.9, "rollout_top_k": 7, "rollout_max_response_len": 99, "reward_key": "acc"}
    inherited = make_config(**rollout)
    own = make_config(**rollout, eval_temperature=0.1, eval_top_p=0.2, eval_top_k=-1, eval_max_response_len=5, eval_reward_key="score")
    for config, expected in ((inherited, (0.8, 0.9, 7, 99, "acc")), (own, (0.1, 0.2, -1, 5, "score"))):
        assert expected == (
            config.eval_rollout.rollout_temperature,
            config.eval_rollout.rollout_top_p,
            config.eval_rollout.rollout_top_k,
            config.eval_rollout.rollout_max_response_len,
            config.resolved_eval_reward_key,
        )


@pytest.mark.parametrize(
    ("given_data", "expected"),
    [([], {}), (["a.jsonl"], {"aime": "a.jsonl"}), (["x", "a.jsonl", "y", "b.jsonl"], {"x": "a.jsonl", "y": "b.jsonl"})],
)
def test_eval_data_sets(make_config: MakeConfig, given_data: list[str], expected: dict[str, str]) -> None:
    config = make_config(eval_prompt_data=given_data)
    assert config.eval_data_sets == expected
    assert config.has_eval == bool(expected)


def test_other_inherited_values(make_config: MakeConfig) -> None:
    config = make_config()
    assert (
        config.resolved_over_sampling_batch_size == 32 and make_config(over_sampling_batch_size=48).resolved_over_sampling_batch_size == 48
    )
    assert config.resolved_eps_clip_high == 0.2 and make_config(eps_clip_high=0.0).resolved_eps_clip_high == 0.0
    assert config.initial_weights_path == "models/tiny" and make_config(ref_load="models/other").initial_weights_path == "models/other"
    assert config.num_train_gpus == 1 and make_config(actor_num_nodes=2, actor_num_gpus_per_node=8).num_train_gpus == 16
    assert config.needs_engine and not make_config(loss_type="sft_loss").needs_engine
    assert config.resolved_num_rollout(10_000) == 10
    assert make_config(num_rollout=None, num_epoch=3).resolved_num_rollout(100) == 9  # 300 prompts fill 9 rollouts of 32.


@pytest.mark.parametrize(
    ("values", "trainer", "engines"),
    [
        ({}, "torch", "embedded"),
        ({"tensor_model_parallel_size": 1}, "torch", "embedded"),
        ({"tensor_model_parallel_size": 2}, "megatron", "sglang"),
        ({"expert_tensor_parallel_size": 1}, "megatron", "sglang"),
        ({"optimizer_cpu_offload": True}, "megatron", "sglang"),
        ({"mtp_num_layers": 1}, "megatron", "sglang"),
        ({"tensor_model_parallel_size": 2, "rollout_backend": "embedded"}, "megatron", "embedded"),
        ({"rollout_external_engine_addrs": ["host:30000"]}, "torch", "sglang"),
        ({"rollout_external_engine_addrs": ["host:30000"], "rollout_backend": "embedded"}, "torch", "embedded"),
        ({"tensor_model_parallel_size": 2, "train_backend": "torch"}, "torch", "embedded"),
        ({"train_backend": "megatron"}, "megatron", "sglang"),
        ({"rollout_num_gpus": 4}, "torch", "sglang"),
        ({"rollout_num_gpus": 0}, "torch", "sglang"),
        ({"rollout_num_gpus_per_engine": 1}, "torch", "sglang"),
        ({"sglang_config": [{"server_groups": [{"num_gpus": 4}]}]}, "torch", "sglang"),
        ({"colocate": True}, "torch", "embedded"),
    ],
)
def test_backends_follow_from_the_flags(values: dict[str, Any], trainer: str, engines: str) -> None:
    config = config_with(**values)
    assert (config.resolved_train_backend, config.resolved_rollout_backend) == (trainer, engines)


def test_backends_follow_from_what_is_passed_on(make_config: MakeConfig) -> None:
    sglang = apply_changes(make_config(), [Change(("sglang", "mem_fraction_static"), 0.5)])
    assert (sglang.resolved_train_backend, sglang.resolved_rollout_backend) == ("torch", "sglang")
    megatron = apply_changes(make_config(), [Change(("megatron", "num_layers"), 4)])
    assert (megatron.resolved_train_backend, megatron.resolved_rollout_backend) == ("megatron", "sglang")


MEGATRON = {"train_backend": "megatron", "rollout_backend": "sglang"}


@pytest.mark.parametrize(
    ("values", "train", "rollout", "total", "nodes", "dp"),
    [
        ({}, 1, 1, 1, 1, 1),
        ({"actor_num_gpus_per_node": 4}, 4, 1, 4, 1, 4),
        ({"rollout_num_gpus": 2}, 1, 2, 3, 1, 1),
        ({"debug_train_only": True}, 1, 0, 1, 1, 1),
        ({**MEGATRON, "rollout_num_gpus": 8}, 8, 8, 16, 2, 8),
        ({**MEGATRON, "rollout_num_gpus": 4, "actor_num_gpus_per_node": 4}, 4, 4, 8, 1, 4),
        ({**MEGATRON, "colocate": True}, 8, 8, 8, 1, 8),
        ({**MEGATRON, "colocate": True, "rollout_num_gpus": 24}, 8, 24, 24, 3, 8),
        ({**MEGATRON, "colocate": True, "rollout_num_gpus": 4}, 8, 4, 8, 1, 8),
        ({**MEGATRON, "rollout_num_gpus": 0, "rollout_external_engine_addrs": ["host:30000"]}, 8, 0, 8, 1, 8),
        ({**MEGATRON, "rollout_external_engine_addrs": ["host:30000"]}, 8, 0, 8, 1, 8),
        ({**MEGATRON, "device": "cpu", "rollout_num_gpus_per_engine": 2}, 1, 2, 3, 1, 1),
        ({**MEGATRON, "num_gpus_per_node": 4, "rollout_num_gpus": 4}, 4, 4, 8, 2, 4),
        ({**MEGATRON, "colocate": True, "actor_num_nodes": 32}, 256, 256, 256, 32, 256),
        (
            {
                "colocate": True,
                "actor_num_nodes": 32,
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 8,
                "context_parallel_size": 4,
            },
            256,
            256,
            256,
            32,
            2,
        ),
    ],
)
def test_sizes_of_the_cluster(values: dict[str, Any], train: int, rollout: int, total: int, nodes: int, dp: int) -> None:
    config = config_with(**values)
    sizes = (
        config.num_train_gpus,
        config.resolved_rollout_num_gpus,
        config.total_num_gpus,
        config.num_nodes,
        config.resolved_data_parallel_size,
    )
    assert sizes == (train, rollout, total, nodes, dp)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, None),
        ({"rollout_max_context_len": 4096}, 4096),
        ({"rollout_max_prompt_len": 512, "rollout_max_response_len": 1024}, 1536),
        ({"rollout_max_prompt_len": 512, "rollout_max_response_len": 8192, "rollout_max_context_len": 4096}, 4096),
    ],
)
def test_the_longest_sample(values: dict[str, Any], tokens: int | None) -> None:
    assert config_with(**values).max_sample_tokens == tokens


@pytest.mark.parametrize(
    ("values", "skips"),
    [
        ({}, True),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, True),
        ({"advantage_estimator": "gspo", "calculate_per_token_loss": True}, True),
        ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.01}, True),
        ({"use_tis": True, "tis_mode": "sequence-mask"}, True),
        ({"use_opsm": True, "use_rollout_logprobs": True}, True),
        ({"use_opd": True, "opd_teacher_url": "http://teacher:1"}, True),
        ({"num_steps_per_rollout": 2, "before_train_step_path": "my.hook"}, True),
        ({"custom_advantage_function_path": "my.advantages", "custom_reward_post_process_path": "my.rewards"}, True),
        ({"use_rollout_routing_replay": True}, True),
        ({"use_routing_replay": True, "num_steps_per_rollout": 2}, True),
        ({"lora_rank": 8}, True),
        ({"exact_on_policy": True}, False),
        ({"use_tis": True, "custom_tis_function_path": "my.weights"}, False),
        ({"loss_type": "sft_loss"}, False),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "my.loss"}, False),
        ({"entropy_coef": 0.01}, False),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, False),
        ({"custom_pg_loss_reducer_function_path": "my.reduce"}, False),
        ({"custom_model_provider_path": "my.model"}, False),
        ({"mtp_num_layers": 1, "enable_mtp_training": True}, False),
        ({**PPO, "num_critic_only_steps": 2}, False),
    ],
)
def test_samples_without_advantage_are_left_out_where_nothing_depends_on_them(values: dict[str, Any], skips: bool) -> None:
    assert config_with(**values).resolved_skip_zero_advantages == skips
    for choice in (True, False):
        assert config_with(**values, skip_zero_advantages=choice).resolved_skip_zero_advantages == choice


@pytest.mark.parametrize("flag", ["moe_aux_loss_coeff", "moe_router_bias_update_rate"])
def test_samples_without_advantage_are_trained_where_experts_are_balanced(flag: str) -> None:
    assert not Config.model_validate({"megatron": {flag: 0.001}}).resolved_skip_zero_advantages
    assert Config.model_validate({"megatron": {flag: 0.0}}).resolved_skip_zero_advantages
