"""Settings of samples, advantages and loss, built from the configuration."""

from typing import Any

from fuligo.algorithms.off_policy import Correction
from fuligo.algorithms.policy_loss import Clip
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.flags import flags
from fuligo.config.hook_specs import HOOKS
from fuligo.config.hooks import Hook, describe_exception, hook_of
from fuligo.errors import TrainerError
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.samples import SampleSettings


def sample_settings(config: Config) -> SampleSettings:
    return SampleSettings(
        has_rewards=not config.is_sft,
        reward_key=config.reward.reward_key,
        post_process=bound_hook(config, "custom_reward_post_process_path"),
        needs_routing=config.replays_engine_routing,
        needs_teacher=config.teacher_from == "engine",
    )


def advantage_settings(config: Config) -> AdvantageSettings:
    flags = config.algorithm
    post_process = config.reward.custom_reward_post_process_path
    return AdvantageSettings(
        samples_per_step=config.resolved_global_batch_size,
        num_steps=config.resolved_num_steps_per_rollout,
        estimator=flags.advantage_estimator,
        normalize_rewards=not flags.disable_rewards_normalization and post_process is None,
        divide_by_std=not flags.disable_grpo_std_normalization,
        whiten=flags.normalize_advantages,
        gamma=flags.gamma,
        rewards_by_turn=flags.turn_rewards,
        lambd=flags.lambd,
        kl_coef=flags.kl_coef,
        kl_type=flags.kl_loss_type,
        old_from_engine=flags.use_rollout_logprobs,
        custom=bound_hook(config, "custom_advantage_function_path"),
        distillation=flags.opd_kl_coef if flags.use_opd else None,
    )


def loss_settings(config: Config) -> LossSettings:
    flags = config.algorithm
    return LossSettings(
        loss_type=flags.loss_type,
        estimator=flags.advantage_estimator,
        clip=Clip(flags.eps_clip, config.resolved_eps_clip_high, flags.eps_clip_c),
        entropy_coef=flags.entropy_coef,
        kl_loss=KlLoss(flags.kl_loss_coef, flags.kl_loss_type, flags.use_unbiased_kl) if flags.use_kl_loss else None,
        correction=Correction(flags.tis_mode, flags.tis_clip_low, flags.tis_clip) if flags.use_tis else None,
        opsm_delta=flags.opsm_delta if flags.use_opsm else None,
        old_from_engine=flags.use_rollout_logprobs,
        per_token=flags.calculate_per_token_loss,
        custom_loss=bound_hook(config, "custom_loss_function_path"),
        custom_weights=bound_hook(config, "custom_tis_function_path"),
        reducer=bound_hook(config, "custom_pg_loss_reducer_function_path"),
    )


class BoundHook:
    """Hook with `args` already bound.

    It is pickled as configuration and flag name, and each rank loads it again; pickle could not import a hook from a file.
    """

    def __init__(self, config: Config, flag_name: str, hook: Hook) -> None:
        self._config, self._flag_name, self._hook = config, flag_name, hook
        self._first = (ArgsView(config),) if "args" in HOOKS[flag_name].parameters else ()

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook. Raises TrainerError with its flag and the failing line if the hook raises."""
        try:
            return self._hook(*self._first, *arguments)
        except Exception as error:
            raise TrainerError(f"{flags()[self._flag_name].option} raised {describe_exception(error, self._hook)}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return bound_hook, (self._config, self._flag_name)


def bound_hook(config: Config, flag_name: str) -> BoundHook | None:
    """Load the hook of a flag and bind `args`; return None if the flag is not set."""
    hook = hook_of(config, flag_name)
    return None if hook is None else BoundHook(config, flag_name, hook)
