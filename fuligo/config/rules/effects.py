"""Flags that take effect only under a condition; otherwise a value other than the default is an error."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change, Rule, Severity
from fuligo.config.flags import Kind, flags
from fuligo.config.rules.required import NUMBERS
from fuligo.config.rules.rule import Violation, unset_flag
from fuligo.config.secret import Environment


@dataclass(frozen=True, slots=True)
class Effect:
    """Flags (`names`) that take effect only if `condition` holds."""

    suffix: str
    """End of the rule's id: `CFG-NO-EFFECT-...`."""
    names: tuple[str, ...]
    condition: Callable[[Config], bool]
    otherwise: str
    """Circumstances in which the flags have no effect, such as `without --use-tis`."""
    remedy: str
    """Change that gives the flags an effect, such as `add --use-tis`."""

    @property
    def id(self) -> str:
        """Stable name of the rule."""
        return f"CFG-NO-EFFECT-{self.suffix}"


def _effect(suffix: str, names: str, condition: Callable[[Config], object], otherwise: str, remedy: str) -> Effect:
    return Effect(suffix, tuple(names.split()), lambda config: bool(condition(config)), otherwise, remedy)


def _needs(suffix: str, names: str, flag: str, value: str | None = None) -> Effect:
    """Return the effect of flags that need another flag, with `value` if one is given."""
    shown = flags()[flag].option + (f" {value}" if value else "")
    given = (lambda config: config.value_of(flag) == value) if value else (lambda config: config.value_of(flag) not in (None, False, []))
    return _effect(suffix, names, given, f"without {shown}", f"add {shown}")


def _estimator_needs(suffix: str, names: str, fact: str, *, or_hook: bool = True, further: str = "") -> Effect:
    """Return the effect of flags that some estimators read; a hook that computes advantages may read any flag."""
    fitting = [name for name, estimator in ESTIMATORS.items() if getattr(estimator, fact)]
    otherwise = f"unless --advantage-estimator is {'one of ' if len(fitting) > 1 else ''}{', '.join(fitting)}"

    def is_read(config: Config) -> bool:
        by_hook = or_hook and config.algorithm.custom_advantage_function_path is not None
        return by_hook or getattr(ESTIMATORS[config.algorithm.advantage_estimator], fact)

    return _effect(suffix, names, is_read, otherwise, f"choose another --advantage-estimator{further}")


def _may_be_a_dict(config: Config) -> bool:
    """Return True if a training reward, or an evaluation reward that inherits the key, may be a dict."""
    name, rollout = config.reward.rm_type, config.rollout
    hooks = (config.reward.custom_rm_path, rollout.custom_generate_function_path, rollout.agent, rollout.rollout_function_path)
    return any(hooks) or config.data.metadata_key is not None or config.eval.eval_config is not None or name not in NUMBERS


# fmt: off
EFFECTS = (
    _effect("SFT", """
        disable_grpo_std_normalization disable_rewards_normalization normalize_advantages gamma turn_rewards lambd value_clip
        num_critic_only_steps critic_lr critic_lr_warmup_iters critic_load eps_clip eps_clip_high eps_clip_c entropy_coef use_kl_loss
        kl_loss_coef use_unbiased_kl kl_coef use_tis use_rollout_logprobs use_opsm use_opd use_routing_replay use_rollout_routing_replay
        custom_advantage_function_path custom_reward_post_process_path extra_rm_path over_sampling_batch_size dynamic_sampling_filter_path
        partial_rollout exact_on_policy data_source_path agent rollout_function_path rollout_sample_filter_path
        rollout_all_samples_process_path custom_pg_loss_reducer_function_path
        """, lambda config: not config.is_sft, "with --loss-type sft_loss", "choose --loss-type policy_loss"),
    _effect("EXACT", "exact_on_policy", lambda config: config.trains and config.needs_engine, "without both a trainer and an engine",
        "remove --debug-rollout-only or --debug-train-only"),
    _needs("SFT-TURNS", "sft_rewritten_turns", "loss_type", "sft_loss"),
    _needs("KL-LOSS", "kl_loss_coef use_unbiased_kl", "use_kl_loss"),
    _estimator_needs("KL-COEF", "kl_coef", "uses_kl_coef", further=" or set --use-kl-loss --kl-loss-coef"),
    _estimator_needs("GAMMA", "gamma", "uses_gamma"),
    _estimator_needs("TURN-ESTIMATOR", "turn_rewards", "uses_gamma"),
    _estimator_needs("VALUES", "lambd", "uses_values"),
    _effect("VALUE-MODEL", "value_clip num_critic_only_steps critic_lr critic_lr_warmup_iters critic_load",
        lambda config: config.trains_values, "without a value model", "choose --advantage-estimator ppo"),
    _estimator_needs("STD", "disable_grpo_std_normalization", "divides_by_std"),
    _effect("STD-RAW", "disable_grpo_std_normalization", lambda config: not config.algorithm.disable_rewards_normalization,
        "with --disable-rewards-normalization", "remove --disable-rewards-normalization"),
    _estimator_needs("DUAL-CLIP", "eps_clip_c", "has_dual_clip", or_hook=False),
    _needs("TIS", "tis_mode tis_clip tis_clip_low custom_tis_function_path", "use_tis"),
    _needs("OPSM", "opsm_delta", "use_opsm"),
    _effect("OPSM-ONE-STEP", "use_opsm",
        lambda config: config.algorithm.use_rollout_logprobs or config.resolved_num_steps_per_rollout > 1,
        "with one optimizer step per rollout, where old and current policy are the same",
        "take the engine's log-probabilities as the old policy's (--use-rollout-logprobs), "
        "or take several steps (--num-steps-per-rollout)"),
    _effect("LOSS-REDUCER", "custom_pg_loss_reducer_function_path", lambda config: config.algorithm.loss_type != "custom_loss",
        "with --loss-type custom_loss, which has no policy-gradient term", "choose --loss-type policy_loss"),
    _effect("ZERO-ADVANTAGES", "skip_zero_advantages", lambda config: config.learns_from_advantages_alone,
        "because samples whose advantages are all 0 also have a gradient",
        "remove the source of that gradient: another --loss-type, --entropy-coef, --kl-loss-coef, --advantage-estimator ppo, "
        "--enable-mtp-training, --moe-aux-loss-coeff, --moe-router-bias-update-rate, --custom-model-provider-path or "
        "--custom-pg-loss-reducer-function-path"),
    _effect("EVAL-FUNCTION", "custom_eval_rollout_log_function_path", lambda config: config.has_eval or not config.eval.eval,
        "without evaluation", "add --eval-prompt-data, --eval-config or --eval-function-path"),
    _needs("PROFILE", "profile_ranks", "profile"),
    _needs("CUSTOM-LOSS", "custom_loss_function_path", "loss_type", "custom_loss"),
    _needs("OPD", "opd_type opd_kl_coef opd_teacher_load opd_teacher_url", "use_opd"),
    _effect("REFERENCE", "ref_update_interval", lambda config: config.needs_reference, "without a reference model",
        "add --use-kl-loss, which loads one"),
    _needs("PARTIAL", "buffer_filter_path mask_offpolicy_in_partial_rollout", "partial_rollout"),
    _effect("STALENESS", "max_staleness", lambda config: config.rollout.partial_rollout or config.rollout.async_mode == "full",
        "without --partial-rollout or --async-mode full", "add one of them"),
    _effect("CONTINUOUS", "over_sampling_batch_size buffer_filter_path mask_offpolicy_in_partial_rollout",
        lambda config: config.rollout.async_mode != "full", "with --async-mode full, which never aborts surplus samples",
        "choose --async-mode sync or one-step"),
    _effect("IN-FLIGHT", "update_weight_requests", lambda config: config.rollout.async_mode == "full",
        "without --async-mode full, where no requests are in flight at a weight sync", "add --async-mode full"),
    _effect("BUFFER", "buffer_filter_path max_staleness",
        lambda config: config.data.data_source_path is None or config.rollout.async_mode == "full",
        "with --data-source-path, which has its own buffer", "remove --data-source-path"),
    _needs("AGENT", "agent_timeout_s agent_sampling agent_host", "agent"),
    _effect("AGENT-REWARD", "rm_type custom_rm_path", lambda config: config.rollout.agent is None,
        "with --agent, whose function returns the reward", "remove --agent"),
    _effect("TURN-REWARDS", "turn_rewards", lambda config: config.rollout.environment or config.debug.load_debug_rollout_data,
        "without an environment that rewards turns", "add --environment"),
    _needs("ENVIRONMENT", "environment_settings environment_isolation max_turns turn_timeout_s episode_timeout_s", "environment"),
    _effect("ENVIRONMENT-PROCESS", "environment_variables environment_memory_mb",
        lambda config: config.rollout.environment is not None and config.rollout.environment_isolation != "none",
        "without environments in separate processes", "add --environment, and remove --environment-isolation none"),
    _effect("ENVIRONMENT-REWARD", "rm_type custom_rm_path group_rm", lambda config: config.rollout.environment is None,
        "with --environment, which gives the reward", "remove --environment; additional rewards can be added with --extra-rm-path"),
    _effect("CUSTOM-REWARD", "rm_type", lambda config: config.reward.custom_rm_path is None,
        "with --custom-rm-path, which scores every sample", "remove --custom-rm-path"),
    _effect("REMOTE-REWARD", "rm_url rm_retries",
        lambda config: config.reward.rm_type in ("remote_rm", "boxed_remote_rm") or config.data.metadata_key is not None,
        "without --rm-type remote_rm", "add --rm-type remote_rm"),
    _effect("REWARD-WORKERS", "rm_num_workers", lambda config: config.reward.rm_type is not None or config.data.metadata_key is not None,
        "without a built-in reward", "add --rm-type"),
    _effect("REWARD-KEY", "reward_key eval_reward_key", _may_be_a_dict, "with a --rm-type whose reward is a number",
        "choose a reward that returns a dict"),
    _needs("EXTRA-REWARDS", "extra_rm_weights", "extra_rm_path"),
    _needs("GROUP-REWARD", "group_rm", "custom_rm_path"),
    # With --no-eval, the reward key of evaluations may stay in the config: it is a flag of the group `reward`.
    _effect("EVAL", """
        eval_interval n_samples_per_eval_prompt eval_max_response_len eval_temperature eval_top_p eval_top_k skip_eval_before_train
        eval_reward_key
        """, lambda config: config.has_eval or not config.eval.eval, "without evaluation data",
        "add --eval-prompt-data, --eval-config or --eval-function-path; to train without evaluation, use --no-eval"),
    _needs("DYNAMIC-BATCH", "max_tokens_per_gpu log_probs_max_tokens_per_gpu", "use_dynamic_batch_size"),
    _effect("LR-DECAY", "min_lr lr_decay_iters", lambda config: config.optimizer.lr_decay_style != "constant",
        "with --lr-decay-style constant", "choose --lr-decay-style linear or cosine"),
    _needs("TOOL-KEY", "tool_key", "apply_chat_template"),
    _effect("TEMPLATE", "apply_chat_template_kwargs",
        lambda config: config.data.apply_chat_template or config.rollout.environment is not None, "without --apply-chat-template",
        "add --apply-chat-template"),
    _needs("CKPT-STEP", "ckpt_step", "load"),
    _effect("SAVES", "save_hf push_to_hub async_save", lambda config: config.saves or not config.trains,
        "with --no-save-last and without a --save-interval of at most --num-rollout", "set --save-interval or remove --no-save-last"),
    _effect("RESTARTS", "max_restarts", lambda config: config.trains, "without a trainer (--debug-rollout-only)",
        "remove --debug-rollout-only"),
    _effect("EXTERNAL", "embedded_max_running_requests embedded_max_total_tokens embedded_dtype embedded_num_threads",
        lambda config: not config.engine.rollout_external_engine_addrs, "on external engines",
        "start the external engines with this setting"),
    _effect("TRACKING-PROJECT", "tracking_project", lambda config: config.observability.use_trackio or config.observability.use_mlflow,
        "without --use-trackio or --use-mlflow", "add one of them (W&B: --wandb-project)"),
    _needs("WANDB", "wandb_project wandb_group wandb_mode", "use_wandb"),
    _needs("DEBUG-LOAD", "load_debug_rollout_data", "debug_train_only"),
    _effect("DEBUG-SAVE", "save_debug_rollout_data", lambda config: not config.debug.debug_train_only, "with --debug-train-only",
        "remove --debug-train-only"),
    _effect("LORA", "lora_alpha lora_dropout lora_target_modules lora_experts lora_use_rslora lora_sync lora_base_precision",
        lambda config: config.uses_adapter, "without an adapter", "add --lora-rank"),
    _needs("RECOMPUTE", "recompute_method recompute_num_layers", "recompute_granularity", "full"),
    _needs("RECOMPUTE-MODULES", "recompute_modules", "recompute_granularity", "selective"),
    _effect("GRADIENT-TYPE", "accumulate_allreduce_grads_in_fp32", lambda config: not config.megatron.get("grad_reduce_in_bf16"),
        "with --grad-reduce-in-bf16", "remove --grad-reduce-in-bf16"),
    _needs("CPU-ADAM", "overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload"),
    _needs("MTP", "mtp_loss_scaling_factor mtp_joint_training", "enable_mtp_training"),
    _effect("PADDING", "data_pad_size_multiplier", lambda config: config.trainer_capabilities.pads_rows,
        "with the torch trainer, which does not pad", "choose --train-backend megatron"),
    _effect("MODEL-ARGS", "override_model_config", lambda config: config.megatron, "without a flag that describes the model",
        "add the flags that differ from config.json"),
    _effect("COLOCATE", "colocate",
        lambda config: not (config.cluster.colocate and config.engine_capabilities.beside_trainer and config.needs_engine),
        "with the embedded engine, which always shares the trainer's first device", "choose --rollout-backend sglang"),
    _effect("OFFLOAD-TRAIN", "offload_train", lambda config: config.takes_turns, "without SGLang engines on the trainer's GPUs",
        "add --colocate"),
    _effect("ENGINES", "use_fault_tolerance rollout_health_check_interval rollout_health_check_timeout engine_python engine_env",
        lambda config: not config.engine_capabilities.beside_trainer and not config.engine.rollout_external_engine_addrs,
        "without SGLang engines that the run starts", "choose --rollout-backend sglang"),
)
# fmt: on


def _rule(effect: Effect, earlier: Sequence[Effect]) -> Rule[Config, Change]:
    """Return the rule of an effect. A flag that is idle for two reasons is reported for the first."""

    def check(config: Config) -> Iterator[Violation]:
        if effect.condition(config):
            return
        # A config does not record which flags were given, so a flag counts as given if its value is not the default.
        given = [name for name in effect.names if config.value_of(name) != flags()[name].default]
        reported = {name for other in earlier if given and not other.condition(config) for name in other.names}
        idle = [flags()[name] for name in given if name not in reported]
        if not idle:
            return
        shown = []
        for flag in idle:
            value = config.value_of(flag.name)
            option = flag.option.replace("--", "--no-", 1) if value is False else flag.option
            shown.append(option if flag.kind is Kind.BOOL else f"{option} {_as_given(value)}")
        have, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        text = f"{' and '.join(shown)} {have} no effect {effect.otherwise}"
        fix, options = tuple(unset_flag(flag.name) for flag in idle), tuple(flag.option for flag in idle)
        yield Violation(text, fix, f"to use {them}, {effect.remedy}", options)

    check.__doc__ = f"{', '.join(flags()[name].option for name in effect.names)}: no effect {effect.otherwise}."
    return Rule(effect.id, Severity.ERROR, (), check)


def _as_given(value: object) -> str:
    if isinstance(value, Environment):
        return shlex.quote(json.dumps(value.shown()))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


RULES = tuple(_rule(effect, EFFECTS[:number]) for number, effect in enumerate(EFFECTS))


def without_idle(config: Config, is_dropped: Callable[[Violation], bool]) -> tuple[Config, list[Violation]]:
    """Unset the flags of each violation of `RULES` for which `is_dropped` returns True; return the config and these violations."""
    dropped: list[Violation] = []
    for rule in RULES:
        for violation in filter(is_dropped, rule.check(config)):
            config = apply_changes(config, violation.fix)
            dropped.append(violation)
    return config, dropped
