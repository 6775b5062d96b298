"""Makes the rollout side of a run from its configuration: the one place here that knows which flag and which hook goes where."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.hooks import Hook, describe_exception, hook_of, load_hook
from fuligo.data.dataset import PromptDataset, PromptTooLongError
from fuligo.data.settings import data_settings
from fuligo.engines.group import EngineGroup
from fuligo.errors import ConfigError, DataError, HookError
from fuligo.formats.hugging_face import read_model_config
from fuligo.models.routing import RoutingShape
from fuligo.rollout.activity import Activity, Observed
from fuligo.rollout.admission import Admission
from fuligo.rollout.continuous import ContinuousRunner
from fuligo.rollout.custom_generate import CustomGenerate
from fuligo.rollout.custom_rollout import CustomRollout
from fuligo.rollout.custom_source import CustomSource
from fuligo.rollout.eval_sets import EvalSetSpec, eval_set_specs
from fuligo.rollout.evaluate import EvalSet, Evaluator
from fuligo.rollout.filters import buffer_filter, group_filter, sample_filter
from fuligo.rollout.generate import Engine, SingleTurn, sampling_params
from fuligo.rollout.parts import RunnerParts
from fuligo.rollout.protocol import GenerateFn, GroupFilter, GroupStream, PromptStream, RewardFn, Rollout, RolloutState
from fuligo.rollout.rewards import CustomReward, RewardRunner
from fuligo.rollout.runner import RolloutRunner
from fuligo.rollout.sampler import Sampler
from fuligo.rollout.source import POP_FIRST, GroupSource
from fuligo.rollout.teacher import ServedTeacher, TaughtReward
from fuligo.types import Prompt, SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class RolloutSide:
    """What samples rollouts, and where it draws from."""

    produce: Callable[[int], Awaitable[Rollout]]
    source: GroupStream
    generate: GenerateFn
    """For evaluation."""
    activity: Activity
    """Of the engines."""
    policy_version: Callable[[], int]
    """Of the weights in the engines."""
    continuous: ContinuousRunner | None = None
    """Where sampling never stops (`--async-mode full`)."""

    def restore(self, state: RolloutState) -> None:
        """Go on where a checkpoint left."""
        (self.continuous or self.source).restore(state)


def build_rollouts(
    config: Config,
    *,
    prompts: PromptStream | None,
    engines: EngineGroup,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFn,
    policy_version: Callable[[], int],
    num_rollout: int,
    teacher: ServedTeacher | None = None,
) -> RolloutSide:
    """
    Args:
        prompts: the training data; None with `--data-source-path`
        teacher: scores what was sampled for training
        policy_version: version of the weights in the engines
        num_rollout: of the whole run

    Raises:
        ConfigError: flags that do not go together.
        HookError: a hook cannot be imported or does not fit.
    """
    args = ArgsView(config)
    source = _source(config, args, prompts)
    activity = Activity()
    single_turn = _single_turn(config, Observed(engines, activity), tokenizer)
    generate = _generate(config, args, single_turn, policy_version)
    evaluated = _generate(config, args, single_turn.without_routing(), policy_version)
    hook = hook_of(config, "rollout_function_path")
    if hook is not None:
        custom = _custom_rollout(config, args, hook, source, generate, policy_version, teacher)
        return RolloutSide(custom.rollout, source, evaluated, activity, policy_version)
    parts = RunnerParts(
        source=source,
        sampler=_sampler(config, generate),
        reward=reward if teacher is None else TaughtReward(reward, teacher),
        engines=engines,
        params=sampling_params(config.rollout),
        flags=config.rollout,
        reward_key=config.reward.reward_key,
        group_filter=_group_filter(config, args),
        sample_filter=_sample_filter(config, args),
        policy_version=policy_version,
    )
    if config.rollout.async_mode == "full":
        continuous = ContinuousRunner(parts, admission=_admission(config, num_rollout))
        return RolloutSide(continuous.rollout, source, evaluated, activity, policy_version, continuous)
    runner = RolloutRunner(parts, aligned_waves=_reproducible(config))
    return RolloutSide(runner.rollout, source, evaluated, activity, policy_version)


def _custom_rollout(
    config: Config,
    args: ArgsView,
    hook: Hook,
    source: GroupStream,
    generate: GenerateFn,
    policy_version: Callable[[], int],
    teacher: ServedTeacher | None,
) -> CustomRollout:
    return CustomRollout(
        hook,
        args,
        source=source,
        generate=generate,
        params=sampling_params(config.rollout),
        policy_version=policy_version,
        reward_key=config.reward.reward_key,
        vocab_size=vocab_size(config),
        teacher=teacher,
    )


def _group_filter(config: Config, args: ArgsView) -> GroupFilter | None:
    hook = hook_of(config, "dynamic_sampling_filter_path")
    return None if hook is None else group_filter(hook, args)


def _sample_filter(config: Config, args: ArgsView) -> Callable[[list[SampleGroup]], None] | None:
    hook = hook_of(config, "rollout_sample_filter_path")
    return None if hook is None else sample_filter(hook, args)


def _sampler(config: Config, generate: GenerateFn) -> Sampler:
    return Sampler(
        generate,
        seed=config.data.rollout_seed,
        stream="train",
        turns=asyncio.Semaphore(config.rollout.rollout_concurrency),
        timeout_s=config.rollout.rollout_timeout_s,
    )


def _admission(config: Config, num_rollout: int) -> Admission:
    flags = config.rollout
    assert flags.max_staleness is not None, "validated: --async-mode full comes with --max-staleness"
    return Admission(flags.rollout_batch_size, flags.max_staleness, config.weight_sync.update_weights_interval, num_rollout)


def build_evaluator(
    config: Config, *, engines: EngineGroup, tokenizer: PreTrainedTokenizerBase, generate: GenerateFn, reward: RewardFn
) -> Evaluator | None:
    """None where there is nothing to evaluate.

    Args:
        generate: `RolloutSide.generate`
        reward: the training reward, for data sets without one of their own

    Raises:
        ConfigError, DataError, HookError: a data set or its settings are wrong.
    """
    specs = eval_set_specs(config)
    if not specs:
        return None
    sets = [_eval_set(config, spec, tokenizer, reward) for spec in specs]
    own_rewards = [eval_set.reward for eval_set in sets if isinstance(eval_set.reward, RewardRunner) and eval_set.reward is not reward]
    return Evaluator(
        sets,
        generate,
        engines,
        seed=config.data.rollout_seed,
        concurrency=config.rollout.rollout_concurrency,
        timeout_s=config.rollout.rollout_timeout_s,
        aligned=_reproducible(config),
        on_close=[own.close for own in own_rewards],
    )


def build_generate(
    config: Config, *, engines: EngineGroup, tokenizer: PreTrainedTokenizerBase, policy_version: Callable[[], int]
) -> GenerateFn:
    """The GenerateFn of a run that only evaluates; `build_rollouts` makes its own."""
    return _generate(config, ArgsView(config), _single_turn(config, engines, tokenizer).without_routing(), policy_version)


def _source(config: Config, args: ArgsView, prompts: PromptStream | None) -> GroupStream:
    flags = config.rollout
    hook = hook_of(config, "data_source_path")
    buffers = flags.partial_rollout and flags.async_mode != "full"
    if hook is not None:
        max_age_in_buffer = None if flags.async_mode == "full" else flags.max_staleness
        for value, option in ((flags.buffer_filter_path, "--buffer-filter-path"), (max_age_in_buffer, "--max-staleness")):
            if value is not None:
                raise ConfigError(f"{option} has no effect with --data-source-path: the buffer is the data source's own; drop one of them")
        try:
            source = hook(args)
        except Exception as error:
            raise HookError(
                f"--data-source-path {config.data.data_source_path}: made with (args), it raised {describe_exception(error, hook)}"
            ) from error
        return CustomSource(source, partial_rollout=buffers, mask_offpolicy=flags.mask_offpolicy_in_partial_rollout)
    assert prompts is not None, "without --data-source-path there are prompt files"
    chooser = hook_of(config, "buffer_filter_path")
    return GroupSource(
        prompts,
        flags.n_samples_per_prompt,
        partial_rollout=buffers,
        buffer_filter=POP_FIRST if chooser is None else buffer_filter(chooser, args),
        mask_offpolicy=flags.mask_offpolicy_in_partial_rollout,
        max_staleness=flags.max_staleness,
    )


def _single_turn(config: Config, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> SingleTurn:
    flags, model = config.rollout, config.model.hf_checkpoint
    return SingleTurn(
        engine,
        tokenizer,
        timeout_s=flags.rollout_timeout_s,
        max_context_len=flags.rollout_max_context_len,
        routing=RoutingShape.read(Path(model)) if model is not None and config.replays_engine_routing else None,
    )


def _generate(config: Config, args: ArgsView, single_turn: SingleTurn, policy_version: Callable[[], int]) -> GenerateFn:
    hook = hook_of(config, "custom_generate_function_path")
    return single_turn if hook is None else CustomGenerate(hook, args, single_turn, policy_version, vocab_size=vocab_size(config))


def vocab_size(config: Config) -> int | None:
    """Of the model, where its config.json says so."""
    model = config.model.hf_checkpoint
    return None if model is None else read_model_config(Path(model)).get("vocab_size")


def _reproducible(config: Config) -> bool:
    """Waves can start aligned: the engine is embedded and ours, nothing else uses it meanwhile, and each sample sends one request."""
    return (
        config.rollout.async_mode == "sync"
        and config.resolved_rollout_backend == "embedded"
        and not config.engine.rollout_external_engine_addrs
        and config.rollout.custom_generate_function_path is None
    )


def _eval_set(config: Config, spec: EvalSetSpec, tokenizer: PreTrainedTokenizerBase, reward: RewardFn) -> EvalSet:
    return EvalSet(
        name=spec.name,
        prompts=_prompts(config, spec, tokenizer),
        num_samples=spec.n_samples_per_eval_prompt or config.eval.n_samples_per_eval_prompt,
        params=spec.sampling_params(config),
        reward=_reward(config, spec) if spec.has_own_reward(config) else reward,
        reward_key=spec.reward_key or config.resolved_eval_reward_key,
    )


def _prompts(config: Config, spec: EvalSetSpec, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    given: dict[str, Any] = {
        name: value
        for name in ("input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template")
        if (value := getattr(spec, name)) is not None
    }
    dataset = PromptDataset.open(spec.path, replace(data_settings(config), **given), tokenizer)
    prompts: list[Prompt] = []
    num_skipped = 0
    for row in range(len(dataset)):
        try:
            prompts.append(dataset[row])
        except DataError as error:
            if not isinstance(error, PromptTooLongError) and not config.data.skip_bad_rows:
                raise
            num_skipped += 1
    if num_skipped:
        logger.warning("evaluation %s: %d of %d rows are too long or malformed and left out", spec.name, num_skipped, len(dataset))
    return prompts


def _reward(config: Config, spec: EvalSetSpec) -> RewardRunner:
    settings, path = spec.reward_settings(config), spec.custom_reward_path(config)
    custom = None if path is None else CustomReward(load_hook("custom_rm_path", path), ArgsView(config), settings.timeout_s)
    return RewardRunner(settings, custom)
