"""Table of flags that take effect only under a condition; otherwise a value other than the default is an error."""

from __future__ import annotations

from collections.abc import Callable

from fuligo.algorithms.estimators import ESTIMATORS, Estimator
from fuligo.config import Config
from fuligo.config.rules.effect import Effect, rules_of
from fuligo.config.rules.required import NUMBERS


def _estimator(config: Config) -> Estimator:
    return ESTIMATORS[config.algorithm.advantage_estimator]


def _custom_advantages(config: Config) -> bool:
    """Return True if a hook computes advantages; it may read any flag."""
    return config.algorithm.custom_advantage_function_path is not None


def _with(suits: Callable[[Estimator], bool]) -> str:
    return f"choose an --advantage-estimator that uses it ({', '.join(name for name, facts in ESTIMATORS.items() if suits(facts))})"


def _may_call_remote_reward(config: Config) -> bool:
    return config.reward.rm_type in ("remote_rm", "boxed_remote_rm") or config.data.metadata_key is not None


def _may_be_a_dict(config: Config) -> bool:
    """Return True if a training reward, or an evaluation reward that inherits the key, may be a dict."""
    name, rollout = config.reward.rm_type, config.rollout
    hooks = (config.reward.custom_rm_path, rollout.custom_generate_function_path, rollout.rollout_function_path)
    return any(hooks) or config.data.metadata_key is not None or config.eval.eval_config is not None or name not in NUMBERS


def _starts_sglang(config: Config) -> bool:
    return config.resolved_rollout_backend == "sglang" and not config.engine.rollout_external_engine_addrs


EFFECTS = (
    Effect(
        "SFT",
        (
            "disable_grpo_std_normalization",
            "disable_rewards_normalization",
            "normalize_advantages",
            "gamma",
            "lambd",
            "value_clip",
            "num_critic_only_steps",
            "critic_lr",
            "critic_lr_warmup_iters",
            "critic_load",
            "eps_clip",
            "eps_clip_high",
            "eps_clip_c",
            "entropy_coef",
            "use_kl_loss",
            "kl_loss_coef",
            "use_unbiased_kl",
            "kl_coef",
            "use_tis",
            "use_rollout_logprobs",
            "use_opsm",
            "use_opd",
            "use_routing_replay",
            "use_rollout_routing_replay",
            "custom_advantage_function_path",
            "custom_reward_post_process_path",
            "over_sampling_batch_size",
            "dynamic_sampling_filter_path",
            "partial_rollout",
            "data_source_path",
            "rollout_function_path",
            "rollout_sample_filter_path",
        ),
        lambda config: not config.is_sft,
        "with --loss-type sft_loss",
        "use --loss-type policy_loss",
    ),
    Effect(
        "KL-LOSS",
        ("kl_loss_coef", "use_unbiased_kl"),
        lambda config: config.algorithm.use_kl_loss,
        "without --use-kl-loss",
        "add --use-kl-loss",
    ),
    Effect(
        "KL-COEF",
        ("kl_coef",),
        lambda config: _estimator(config).uses_kl_coef or _custom_advantages(config),
        "with this --advantage-estimator",
        _with(lambda facts: facts.uses_kl_coef) + " or use --use-kl-loss --kl-loss-coef",
    ),
    Effect(
        "GAMMA",
        ("gamma",),
        lambda config: _estimator(config).uses_gamma or _custom_advantages(config),
        "with this --advantage-estimator",
        _with(lambda facts: facts.uses_gamma),
    ),
    Effect(
        "VALUES",
        ("lambd",),
        lambda config: _estimator(config).uses_values or _custom_advantages(config),
        "with this --advantage-estimator",
        "choose --advantage-estimator ppo",
    ),
    Effect(
        "VALUE-MODEL",
        ("value_clip", "num_critic_only_steps", "critic_lr", "critic_lr_warmup_iters", "critic_load"),
        lambda config: config.trains_values,
        "without a value model",
        "choose --advantage-estimator ppo",
    ),
    Effect(
        "STD",
        ("disable_grpo_std_normalization",),
        lambda config: _estimator(config).divides_by_std or _custom_advantages(config),
        "with this --advantage-estimator",
        _with(lambda facts: facts.divides_by_std),
    ),
    Effect(
        "STD-RAW",
        ("disable_grpo_std_normalization",),
        lambda config: not config.algorithm.disable_rewards_normalization,
        "with --disable-rewards-normalization",
        "remove --disable-rewards-normalization",
    ),
    Effect(
        "DUAL-CLIP",
        ("eps_clip_c",),
        lambda config: _estimator(config).has_dual_clip,
        "with this --advantage-estimator",
        _with(lambda facts: facts.has_dual_clip),
    ),
    Effect(
        "TIS",
        ("tis_mode", "tis_clip", "tis_clip_low", "custom_tis_function_path"),
        lambda config: config.algorithm.use_tis,
        "without --use-tis",
        "add --use-tis",
    ),
    Effect("OPSM", ("opsm_delta",), lambda config: config.algorithm.use_opsm, "without --use-opsm", "add --use-opsm"),
    Effect(
        "OPSM-ONE-STEP",
        ("use_opsm",),
        lambda config: config.algorithm.use_rollout_logprobs or config.resolved_num_steps_per_rollout > 1,
        "with one optimizer step per rollout, where old and current policy are the same",
        "take the engine's log-probabilities as the old policy's (--use-rollout-logprobs), or take several steps (--num-steps-per-rollout)",
    ),
    Effect(
        "CUSTOM-LOSS",
        ("custom_loss_function_path",),
        lambda config: config.algorithm.loss_type == "custom_loss",
        "without --loss-type custom_loss",
        "add --loss-type custom_loss",
    ),
    Effect(
        "OPD",
        ("opd_type", "opd_kl_coef", "opd_teacher_load", "opd_teacher_url"),
        lambda config: config.algorithm.use_opd,
        "without --use-opd",
        "add --use-opd",
    ),
    Effect(
        "REFERENCE",
        ("ref_update_interval",),
        lambda config: config.needs_reference,
        "without a reference model",
        "add --use-kl-loss, which loads one",
    ),
    Effect(
        "PARTIAL",
        ("buffer_filter_path", "mask_offpolicy_in_partial_rollout"),
        lambda config: config.rollout.partial_rollout,
        "without --partial-rollout",
        "add --partial-rollout",
    ),
    Effect(
        "STALENESS",
        ("max_staleness",),
        lambda config: config.rollout.partial_rollout or config.rollout.async_mode == "full",
        "without --partial-rollout or --async-mode full",
        "add one of them",
    ),
    Effect(
        "CONTINUOUS",
        ("over_sampling_batch_size", "buffer_filter_path", "mask_offpolicy_in_partial_rollout"),
        lambda config: config.rollout.async_mode != "full",
        "with --async-mode full, which never aborts surplus samples",
        "use --async-mode sync or one-step",
    ),
    Effect(
        "BUFFER",
        ("buffer_filter_path", "max_staleness"),
        lambda config: config.data.data_source_path is None or config.rollout.async_mode == "full",
        "with --data-source-path, which has its own buffer",
        "remove --data-source-path",
    ),
    Effect(
        "CUSTOM-REWARD",
        ("rm_type",),
        lambda config: config.reward.custom_rm_path is None,
        "with --custom-rm-path, which scores every sample",
        "remove --custom-rm-path",
    ),
    Effect("REMOTE-REWARD", ("rm_url", "rm_retries"), _may_call_remote_reward, "without --rm-type remote_rm", "add --rm-type remote_rm"),
    Effect(
        "REWARD-WORKERS",
        ("rm_num_workers",),
        lambda config: config.reward.rm_type is not None or config.data.metadata_key is not None,
        "without a built-in reward",
        "add --rm-type",
    ),
    Effect(
        "REWARD-KEY",
        ("reward_key", "eval_reward_key"),
        _may_be_a_dict,
        "with a --rm-type whose reward is a number",
        "choose a reward that returns a dict",
    ),
    Effect(
        "GROUP-REWARD",
        ("group_rm",),
        lambda config: config.reward.custom_rm_path is not None,
        "without --custom-rm-path",
        "add --custom-rm-path",
    ),
    Effect(
        "EVAL",
        (
            "eval_interval",
            "n_samples_per_eval_prompt",
            "eval_max_response_len",
            "eval_temperature",
            "eval_top_p",
            "eval_top_k",
            "skip_eval_before_train",
            "eval_reward_key",
        ),
        lambda config: config.has_eval,
        "without evaluation data",
        "add --eval-prompt-data or --eval-config",
    ),
    Effect(
        "DYNAMIC-BATCH",
        ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu"),
        lambda config: config.train.use_dynamic_batch_size,
        "without --use-dynamic-batch-size",
        "add --use-dynamic-batch-size",
    ),
    Effect(
        "LR-DECAY",
        ("min_lr", "lr_decay_iters"),
        lambda config: config.optimizer.lr_decay_style != "constant",
        "with --lr-decay-style constant",
        "choose --lr-decay-style linear or cosine",
    ),
    Effect(
        "TEMPLATE",
        ("apply_chat_template_kwargs", "tool_key"),
        lambda config: config.data.apply_chat_template,
        "without --apply-chat-template",
        "add --apply-chat-template",
    ),
    Effect("CKPT-STEP", ("ckpt_step",), lambda config: config.checkpoint.load is not None, "without --load", "add --load"),
    Effect(
        "EXTERNAL",
        ("embedded_max_running_requests", "embedded_max_total_tokens", "embedded_dtype", "embedded_num_threads"),
        lambda config: not config.engine.rollout_external_engine_addrs,
        "on external engines",
        "start the external engines with the same setting",
    ),
    Effect(
        "WANDB",
        ("wandb_project", "wandb_group", "wandb_mode"),
        lambda config: config.observability.use_wandb,
        "without --use-wandb",
        "add --use-wandb",
    ),
    Effect(
        "DEBUG-LOAD",
        ("load_debug_rollout_data",),
        lambda config: config.debug.debug_train_only,
        "without --debug-train-only",
        "add --debug-train-only",
    ),
    Effect(
        "DEBUG-SAVE",
        ("save_debug_rollout_data",),
        lambda config: not config.debug.debug_train_only,
        "with --debug-train-only",
        "remove --debug-train-only",
    ),
    Effect(
        "RECOMPUTE",
        ("recompute_method", "recompute_num_layers"),
        lambda config: config.parallel.recompute_granularity == "full",
        "without --recompute-granularity full",
        "add --recompute-granularity full",
    ),
    Effect(
        "RECOMPUTE-MODULES",
        ("recompute_modules",),
        lambda config: config.parallel.recompute_granularity == "selective",
        "without --recompute-granularity selective",
        "add --recompute-granularity selective",
    ),
    Effect(
        "CPU-ADAM",
        ("overlap_cpu_optimizer_d2h_h2d",),
        lambda config: config.optimizer.optimizer_cpu_offload,
        "without --optimizer-cpu-offload",
        "add --optimizer-cpu-offload",
    ),
    Effect(
        "MTP",
        ("mtp_loss_scaling_factor", "mtp_joint_training"),
        lambda config: config.train.enable_mtp_training,
        "without --enable-mtp-training",
        "add --enable-mtp-training",
    ),
    Effect(
        "PADDING",
        ("data_pad_size_multiplier",),
        lambda config: config.resolved_train_backend == "megatron",
        "with the torch trainer, which does not pad",
        "choose --train-backend megatron",
    ),
    Effect(
        "MODEL-ARGS",
        ("override_model_config",),
        lambda config: bool(config.megatron),
        "without a flag that describes the model",
        "give the flags that differ from config.json",
    ),
    Effect(
        "COLOCATE",
        ("colocate",),
        lambda config: config.resolved_rollout_backend == "sglang" or not config.needs_engine,
        "with the embedded engine, which always shares the trainer's first device",
        "choose --rollout-backend sglang",
    ),
    Effect(
        "ENGINES",
        ("use_fault_tolerance", "rollout_health_check_interval", "rollout_health_check_timeout", "engine_python", "engine_env"),
        _starts_sglang,
        "without SGLang engines that the run starts",
        "choose --rollout-backend sglang",
    ),
)

RULES = rules_of(EFFECTS)
