"""Flags that have an effect only under a condition. Where it does not hold, a value other than the neutral one is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fuligo.algorithms.estimators import ESTIMATORS, Estimator, estimator
from fuligo.config import Config
from fuligo.config.flags import Flag, Kind, flags


@dataclass(frozen=True, slots=True)
class Effect:
    """`names` have an effect only where `condition` holds."""

    names: tuple[str, ...]
    condition: Callable[[Config], bool]
    otherwise: str
    """When they have none: `without --use-tis`."""
    fix: str


def problems(config: Config) -> Iterator[str]:
    """One text for every flag that was changed and has no effect."""
    reported: set[str] = set()
    for effect in EFFECTS:
        if effect.condition(config):
            continue
        for name in effect.names:
            flag = flags()[name]
            value = getattr(getattr(config, flag.group), name)
            # The default is the neutral value of each of these flags: coefficients 0, switches off, paths not given.
            if value != flag.default and name not in reported:
                reported.add(name)
                yield f"{_shown(flag, value)} has no effect {effect.otherwise}: {effect.fix}, or leave it out"


def _shown(flag: Flag, value: object) -> str:
    if flag.kind is Kind.BOOL:
        return flag.option
    return f"{flag.option} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _estimator(config: Config) -> Estimator:
    return estimator(config.algorithm.advantage_estimator)


def _custom_advantages(config: Config) -> bool:
    """What a hook reads of the flags is its affair."""
    return config.algorithm.custom_advantage_function_path is not None


def _with(suits: Callable[[Estimator], bool]) -> str:
    return f"choose an --advantage-estimator that uses it ({', '.join(name for name, facts in ESTIMATORS.items() if suits(facts))})"


def _may_call_remote_reward(config: Config) -> bool:
    return config.reward.rm_type in ("remote_rm", "boxed_remote_rm") or config.data.metadata_key is not None


EFFECTS = (
    Effect(
        (
            "disable_grpo_std_normalization",
            "disable_rewards_normalization",
            "normalize_advantages",
            "gamma",
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
            "custom_advantage_function_path",
            "custom_reward_post_process_path",
            "over_sampling_batch_size",
            "dynamic_sampling_filter_path",
            "partial_rollout",
        ),
        lambda config: not config.is_sft,
        "with --loss-type sft_loss",
        "use --loss-type policy_loss",
    ),
    Effect(("kl_loss_coef", "use_unbiased_kl"), lambda config: config.algorithm.use_kl_loss, "without --use-kl-loss", "add --use-kl-loss"),
    Effect(
        ("kl_coef",),
        lambda config: _estimator(config).uses_kl_coef or _custom_advantages(config),
        "with this --advantage-estimator",
        _with(lambda facts: facts.uses_kl_coef) + ", use --use-kl-loss --kl-loss-coef",
    ),
    Effect(
        ("gamma",),
        lambda config: _estimator(config).uses_gamma or _custom_advantages(config),
        "with this --advantage-estimator",
        _with(lambda facts: facts.uses_gamma),
    ),
    Effect(
        ("disable_grpo_std_normalization",),
        lambda config: _estimator(config).divides_by_std or _custom_advantages(config),
        "with this --advantage-estimator",
        _with(lambda facts: facts.divides_by_std),
    ),
    Effect(
        ("disable_grpo_std_normalization",),
        lambda config: not config.algorithm.disable_rewards_normalization,
        "with --disable-rewards-normalization",
        "remove --disable-rewards-normalization",
    ),
    Effect(
        ("eps_clip_c",),
        lambda config: _estimator(config).surrogate != "cispo",
        "with this --advantage-estimator",
        _with(lambda facts: facts.surrogate != "cispo"),
    ),
    Effect(
        ("tis_mode", "tis_clip", "tis_clip_low", "custom_tis_function_path"),
        lambda config: config.algorithm.use_tis,
        "without --use-tis",
        "add --use-tis",
    ),
    Effect(
        ("custom_loss_function_path",),
        lambda config: config.algorithm.loss_type == "custom_loss",
        "without --loss-type custom_loss",
        "add --loss-type custom_loss",
    ),
    Effect(
        ("ref_update_interval",),
        lambda config: config.needs_reference,
        "without a reference model",
        "add --use-kl-loss, which loads one",
    ),
    Effect(
        ("buffer_filter_path", "mask_offpolicy_in_partial_rollout", "max_staleness"),
        lambda config: config.rollout.partial_rollout,
        "without --partial-rollout",
        "add --partial-rollout",
    ),
    Effect(
        ("buffer_filter_path", "max_staleness"),
        lambda config: config.data.data_source_path is None,
        "with --data-source-path, whose buffer is its own",
        "remove --data-source-path",
    ),
    Effect(
        ("rm_type",),
        lambda config: config.reward.custom_rm_path is None,
        "with --custom-rm-path, which judges every sample",
        "remove --custom-rm-path",
    ),
    Effect(("rm_url", "rm_retries"), _may_call_remote_reward, "without --rm-type remote_rm", "add --rm-type remote_rm"),
    Effect(
        ("rm_num_workers",),
        lambda config: config.reward.rm_type is not None or config.data.metadata_key is not None,
        "without a built-in reward",
        "add --rm-type",
    ),
    Effect(("group_rm",), lambda config: config.reward.custom_rm_path is not None, "without --custom-rm-path", "add --custom-rm-path"),
    Effect(
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
        "without data to evaluate on",
        "add --eval-prompt-data or --eval-config",
    ),
    Effect(
        ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu"),
        lambda config: config.train.use_dynamic_batch_size,
        "without --use-dynamic-batch-size",
        "add --use-dynamic-batch-size",
    ),
    Effect(
        ("min_lr", "lr_decay_iters"),
        lambda config: config.optimizer.lr_decay_style != "constant",
        "with --lr-decay-style constant",
        "choose --lr-decay-style linear or cosine",
    ),
    Effect(
        ("apply_chat_template_kwargs", "tool_key"),
        lambda config: config.data.apply_chat_template,
        "without --apply-chat-template",
        "add --apply-chat-template",
    ),
    Effect(("ckpt_step",), lambda config: config.checkpoint.load is not None, "without --load", "add --load"),
    Effect(
        ("embedded_max_running_requests", "embedded_max_total_tokens", "embedded_dtype", "embedded_num_threads"),
        lambda config: not config.engine.rollout_external_engine_addrs,
        "on engines that already run",
        "start those engines with the same setting",
    ),
    Effect(
        ("wandb_project", "wandb_group", "wandb_mode"),
        lambda config: config.observability.use_wandb,
        "without --use-wandb",
        "add --use-wandb",
    ),
    Effect(
        ("load_debug_rollout_data",),
        lambda config: config.debug.debug_train_only,
        "without --debug-train-only",
        "add --debug-train-only",
    ),
    Effect(
        ("save_debug_rollout_data",),
        lambda config: not config.debug.debug_train_only,
        "with --debug-train-only",
        "remove --debug-train-only",
    ),
)
