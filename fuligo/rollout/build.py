"""Construction of the rollout side of a run, and of its evaluator, from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.hooks import Hook, hook_of, load_hook, reraised
from fuligo.data.dataset import PromptDataset, PromptTooLongError
from fuligo.data.source import PromptSource
from fuligo.data.template import ChatTemplate
from fuligo.engines.engine import Engine
from fuligo.engines.group import EngineGroup
from fuligo.environments.isolation.factory import environment_factory
from fuligo.environments.load import EnvironmentFactory
from fuligo.environments.rendering import Renderer
from fuligo.errors import DataError, HookError
from fuligo.formats.hugging_face import read_model_config
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Policy
from fuligo.models.routing import RoutingShape
from fuligo.models.vision.placing import prompt_images
from fuligo.models.vision.processor import ImageProcessor, ResizedImages
from fuligo.rollout.agents import AgentGenerate
from fuligo.rollout.continuous import Admission, ContinuousRunner
from fuligo.rollout.custom_generate import CustomGenerate
from fuligo.rollout.custom_rollout import CustomEvaluator, CustomRollout
from fuligo.rollout.custom_source import CustomSource
from fuligo.rollout.episodes import Episodes, Limits
from fuligo.rollout.eval_sets import EvalSetSpec, eval_set_specs
from fuligo.rollout.evaluate import EvalSet, Evaluates, Evaluator
from fuligo.rollout.filters import all_samples, buffer_filter, group_filter, sample_filter
from fuligo.rollout.generate import SingleTurn, sampling_params
from fuligo.rollout.producer import Activity, CountedEngine
from fuligo.rollout.protocol import GenerateFn, GroupStream, RewardFn, RolloutMethod
from fuligo.rollout.rewards import CustomReward, RewardRunner
from fuligo.rollout.runner import RolloutRunner, RunnerParts
from fuligo.rollout.sampler import Sampler, Turns
from fuligo.rollout.source import POP_FIRST, GroupSource
from fuligo.rollout.teacher import RewardWithTeacher, ServedTeacher
from fuligo.types import Prompt

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Generators:
    """Functions that generate the samples of a run."""

    training: GenerateFn
    evaluation: GenerateFn
    closers: tuple[Callable[[], Awaitable[None]], ...] = ()

    async def close(self) -> None:
        """Close the gateway, agents and environments."""
        for close in reversed(self.closers):
            await close()


@dataclass(slots=True, frozen=True)
class Sampling:
    """Components that sample the rollouts of a run."""

    method: RolloutMethod
    source: GroupStream
    generators: Generators
    activity: Activity


def build_sampling(
    config: Config,
    *,
    prompts: PromptSource | None,
    engines: EngineGroup,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFn,
    policy_version: Callable[[], int],
    num_rollout: int,
    teacher: ServedTeacher | None = None,
) -> Sampling:
    """Build the components that sample rollouts.

    Args:
        prompts: the training data; None with `--data-source-path`
        policy_version: returns the version of the weights in the engines
        num_rollout: number of rollouts of the whole run
        teacher: teacher that scores the sampled responses; None without one

    Raises:
        HookError: a hook cannot be imported or does not fit
        ConfigError, RolloutError: see `build_generators`
    """
    args, flags, concurrency = ArgsView(config), config.rollout, config.resolved_rollout_concurrency
    source, activity = _source(config, args, prompts), Activity()
    generators = build_generators(config, engine=CountedEngine(engines, activity), tokenizer=tokenizer, policy_version=policy_version)
    turns = Turns(concurrency)
    parts = RunnerParts(
        source=source,
        sampler=Sampler(generators.training, seed=config.data.rollout_seed, stream="train", turns=turns, timeout_s=config.sample_timeout_s),
        reward=reward if teacher is None else RewardWithTeacher(reward, teacher),
        engines=engines,
        params=sampling_params(flags),
        flags=flags,
        concurrency=concurrency,
        reward_key=config.reward.reward_key,
        pass_key=config.resolved_eval_reward_key,
        group_filter=_adapted(config, args, "dynamic_sampling_filter_path", group_filter),
        all_samples=_adapted(config, args, "rollout_all_samples_process_path", all_samples),
        sample_filter=_adapted(config, args, "rollout_sample_filter_path", sample_filter),
        policy_version=policy_version,
    )
    if (hook := hook_of(config, "rollout_function_path")) is not None:
        method = CustomRollout(hook, args, parts, vocab_size=vocab_size(config), teacher=teacher)
    elif flags.async_mode == "full":
        assert flags.max_staleness is not None, "validated: --async-mode full comes with --max-staleness"
        interval = config.weight_sync.update_weights_interval
        method = ContinuousRunner(parts, admission=Admission(flags.rollout_batch_size, flags.max_staleness, interval, num_rollout))
    else:
        method = RolloutRunner(parts, aligned_waves=reproducible(config))
    return Sampling(method, source, generators, activity)


def _adapted(config: Config, args: ArgsView, flag_name: str, adapt: Callable[[Hook, ArgsView], T]) -> T | None:
    hook = hook_of(config, flag_name)
    return None if hook is None else adapt(hook, args)


def build_generators(
    config: Config, *, engine: Engine, tokenizer: PreTrainedTokenizerBase, policy_version: Callable[[], int]
) -> Generators:
    """Build the GenerateFn of training and of evaluation.

    Raises ConfigError if the tokenizer or its chat template does not support an agent or environment, HookError if a hook cannot be
    imported or does not fit, and what `environment_factory` raises.
    """
    if (agent := hook_of(config, "agent")) is not None:
        return _agents(config, agent, engine, tokenizer)
    single_turn = _single_turn(config, engine, tokenizer)
    both = (single_turn, single_turn.without_routing())
    if config.rollout.environment is not None:
        factory = environment_factory(config)
        training, evaluation = (_episodes(config, factory, turns, tokenizer) for turns in both)
        return Generators(training, evaluation, (training.close, evaluation.close))
    if (hook := hook_of(config, "custom_generate_function_path")) is None:
        return Generators(*both)
    args, size = ArgsView(config), vocab_size(config)
    training, evaluation = (CustomGenerate(hook, args, turns, policy_version, vocab_size=size) for turns in both)
    return Generators(training, evaluation)


def _agents(config: Config, agent: Hook, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Generators:
    """Build the gateway and the generators that run the agent. The gateway starts when the first session opens."""
    flags, model = config.rollout, str(config.model.hf_checkpoint)
    policy = Policy(
        engine,
        _renderer(config, tokenizer),
        tokenizer,
        name=Path(model).name,
        timeout_s=flags.rollout_timeout_s,
        max_context_len=flags.rollout_max_context_len,
        replaces_params=flags.agent_sampling == "replace",
    )
    gateway = Gateway(policy, flags.agent_host)
    may_continue = flags.partial_rollout or flags.async_mode == "full"
    training, evaluation = (
        AgentGenerate(agent, gateway, tokenizer, timeout_s=flags.agent_timeout_s, continues=continues) for continues in (may_continue, True)
    )
    return Generators(training, evaluation, (gateway.close, training.close, evaluation.close))


def _source(config: Config, args: ArgsView, prompts: PromptSource | None) -> GroupStream:
    flags = config.rollout
    hook = hook_of(config, "data_source_path")
    buffers = flags.partial_rollout and flags.async_mode != "full"
    if hook is not None:
        with reraised(f"--data-source-path {config.data.data_source_path}: the constructor raised", hook, HookError):
            source = hook(args)
        return CustomSource(source, partial_rollout=buffers, mask_offpolicy=flags.mask_offpolicy_in_partial_rollout)
    assert prompts is not None, "validated: without --data-source-path there are prompt files"
    return GroupSource(
        prompts,
        flags.n_samples_per_prompt,
        partial_rollout=buffers,
        buffer_filter=_adapted(config, args, "buffer_filter_path", buffer_filter) or POP_FIRST,
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
        images=_resized_images(config),
    )


def _resized_images(config: Config) -> ResizedImages | None:
    """Return the image resizer for engines whose image processor differs from the trainer's; None if none is needed."""
    if not config.data.multimodal_keys or not config.engine_capabilities.resizes_images:
        return None
    return ResizedImages(ImageProcessor(str(config.model.hf_checkpoint)))


def _renderer(config: Config, tokenizer: PreTrainedTokenizerBase) -> Renderer:
    from fuligo.models.directory import end_ids_of

    end_ids = end_ids_of(str(config.model.hf_checkpoint), tokenizer) | frozenset(config.rollout.rollout_stop_token_ids)
    return Renderer(tokenizer, ChatTemplate(tokenizer, config.data.apply_chat_template_kwargs), end_ids)


def _episodes(config: Config, factory: EnvironmentFactory, single_turn: SingleTurn, tokenizer: PreTrainedTokenizerBase) -> Episodes:
    flags = config.rollout
    return Episodes(
        single_turn,
        factory,
        _renderer(config, tokenizer),
        tokenizer,
        limits=Limits(
            max_turns=flags.max_turns,
            turn_timeout_s=flags.turn_timeout_s,
            episode_timeout_s=flags.episode_timeout_s or flags.rollout_timeout_s,
            max_context_len=flags.rollout_max_context_len,
        ),
    )


def build_evaluator(
    config: Config,
    *,
    engines: EngineGroup,
    tokenizer: PreTrainedTokenizerBase,
    generate: GenerateFn,
    reward: RewardFn,
    policy_version: Callable[[], int],
) -> Evaluates | None:
    """Build the evaluator; return None if there are neither evaluation datasets nor an --eval-function-path.

    `reward`, that of training, judges datasets without their own.

    Raises ConfigError, DataError or HookError if a dataset or hook is invalid.
    """
    specs = eval_set_specs(config)
    hook = hook_of(config, "eval_function_path")
    if not specs and hook is None:
        return None
    sets = [
        EvalSet(
            name=spec.name,
            prompts=_eval_prompts(config, spec, tokenizer),
            num_samples=spec.n_samples_per_eval_prompt or config.eval.n_samples_per_eval_prompt,
            params=spec.sampling_params(config),
            reward=_eval_reward(config, spec) if spec.has_own_reward(config) else reward,
            reward_key=spec.reward_key or config.resolved_eval_reward_key,
        )
        for spec in specs
    ]
    if hook is not None:
        return CustomEvaluator(
            hook,
            ArgsView(config),
            sets,
            generate,
            EvalSetSpec(name="default", path=["none"]).sampling_params(config),
            policy_version=policy_version,
            reward_key=config.resolved_eval_reward_key,
            vocab_size=vocab_size(config),
        )
    own_rewards = [eval_set.reward for eval_set in sets if isinstance(eval_set.reward, RewardRunner) and eval_set.reward is not reward]
    return Evaluator(
        sets,
        generate,
        engines,
        seed=config.data.rollout_seed,
        concurrency=config.resolved_rollout_concurrency,
        timeout_s=config.sample_timeout_s,
        aligned=reproducible(config),
        on_close=[own.close for own in own_rewards],
    )


def _eval_prompts(config: Config, spec: EvalSetSpec, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    dataset = PromptDataset.open(spec.path, spec.data_flags(config), tokenizer, prompt_images(config))
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
        logger.warning("evaluation %s: skipped %d of %d rows, which are too long or malformed", spec.name, num_skipped, len(dataset))
    return prompts


def _eval_reward(config: Config, spec: EvalSetSpec) -> RewardRunner:
    flags = spec.reward_flags(config)
    path = flags.custom_rm_path
    custom = None if path is None else CustomReward(load_hook("custom_rm_path", path), ArgsView(config), flags.rm_timeout_s)
    return RewardRunner(flags, custom)


def vocab_size(config: Config) -> int | None:
    """Return the vocabulary size of `--hf-checkpoint`; None without a checkpoint, or if its config.json does not state it."""
    model = config.model.hf_checkpoint
    return None if model is None else read_model_config(Path(model)).get("vocab_size")


def reproducible(config: Config) -> bool:
    """Return whether waves can start aligned: in sync mode, on a reproducible engine that the run started, with one request per sample."""
    return (
        config.rollout.async_mode == "sync"
        and config.engine_capabilities.is_reproducible
        and not config.engine.rollout_external_engine_addrs
        and config.rollout.custom_generate_function_path is None
        and config.rollout.agent is None
        and config.rollout.environment is None
    )
