"""Rollouts of a run, built from the configuration: sampled, taken from supervised data, or loaded from an earlier run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuligo.config import Config
from fuligo.data.check import longest_prompt
from fuligo.data.conversation import ConversationDataset, ConversationSource
from fuligo.data.dataset import PromptDataset
from fuligo.data.source import PromptSource
from fuligo.engines.group import EngineGroup
from fuligo.engines.profiling import EngineProfiler
from fuligo.formats.hugging_face import read_model_config
from fuligo.job.engines import Engines
from fuligo.limits import collector_paused
from fuligo.models.vision.placing import prompt_images
from fuligo.rollout.build import build_evaluator, build_generators, build_sampling, vocab_size
from fuligo.rollout.continuous import ContinuousRunner
from fuligo.rollout.evaluate import Evaluates
from fuligo.rollout.given import SavedRollouts, SupervisedRollouts
from fuligo.rollout.producer import Activity, PacedRollouts, PhaseTimer, RolloutProducer
from fuligo.rollout.protocol import RolloutMethod, RolloutState
from fuligo.rollout.rewards import reward_runner
from fuligo.rollout.teacher import ServedTeacher

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class RunData:
    """Tokenizer and training data of a run, opened before its model is loaded."""

    tokenizer: PreTrainedTokenizerBase
    source: PromptSource | ConversationSource | None
    """Prompts or conversations of the run; None with `--data-source-path` and with saved rollouts."""
    num_rollout: int
    """Rollouts of the whole run, from --num-rollout or --num-epoch."""

    @classmethod
    def open(cls, config: Config, state: RolloutState | None = None) -> RunData:
        """Load the tokenizer and index the data.

        `state` is the rollout state of the resumed checkpoint. Raises DataError if the data are missing or malformed, or differ from those
        of the checkpoint.
        """
        assert config.model.hf_checkpoint is not None, "validated"
        with collector_paused():
            from fuligo.models.directory import load_tokenizer

            tokenizer = load_tokenizer(config.model.hf_checkpoint, runs_its_code=config.model.trust_remote_code)
        source = cls._open_source(config, tokenizer)
        if source is not None and state is not None:
            source.check(state.source)
        return cls(tokenizer, source, config.resolved_num_rollout(len(source) if source is not None else 0))

    @staticmethod
    def _open_source(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSource | ConversationSource | None:
        entries = config.data.prompt_data
        if not entries or config.debug.load_debug_rollout_data is not None:
            return None
        if config.is_sft:
            from fuligo.models.directory import end_ids_of

            end_ids = end_ids_of(str(config.model.hf_checkpoint), tokenizer)
            return ConversationSource(ConversationDataset.open(entries, config.data, tokenizer, prompt_images(config), end_ids))
        dataset = PromptDataset.open(entries, config.data, tokenizer, prompt_images(config))
        _warn_of_long_prompts(config, dataset)
        return PromptSource(dataset)


def _warn_of_long_prompts(config: Config, dataset: PromptDataset) -> None:
    """Warn if prompts do not fit the model's context with a response, without --rollout-max-prompt-len; their samples would fail."""
    flags = config.rollout
    if config.data.rollout_max_prompt_len is not None or config.has_custom_generation or flags.rollout_function_path:
        return
    context, response = read_model_config(config.hf_checkpoint_path).get("max_position_embeddings"), flags.rollout_max_response_len
    if flags.rollout_max_context_len is not None:
        most, limit = flags.rollout_max_context_len - 1, f"--rollout-max-context-len {flags.rollout_max_context_len:,}"
    elif isinstance(context, int):
        most, limit = context - response, f"--rollout-max-response-len {response:,} in the model's context of {context:,} tokens"
    else:
        return
    longest = longest_prompt(dataset, config.num_drawn)
    if longest is not None and 0 < most < longest[1]:
        logger.warning(
            "%s: the prompt has %s tokens, more than %s leaves room for; samples of such prompts fail: drop them with "
            "--rollout-max-prompt-len %d",
            dataset.rows.place(longest[0]),
            f"{longest[1]:,}",
            limit,
            most,
        )


@dataclass(slots=True, frozen=True)
class RolloutBuilder:
    """Builder of the rollouts of a run and of its evaluator."""

    config: Config
    data: RunData
    engines: Engines | None
    """Engines to sample from; None if nothing is sampled."""
    teacher: ServedTeacher | None
    """Teacher on an engine; None without one."""
    policy_version: Callable[[], int]
    stack: AsyncExitStack
    run_dir: Path
    """Run directory, which receives the engines' profiles."""

    def build(
        self, *, start: int, state: RolloutState | None, phase: PhaseTimer, end_early: asyncio.Event
    ) -> tuple[PacedRollouts, Evaluates | None]:
        """Build the rollouts from step `start` on, which end early when `end_early` is set, and the evaluator if there is evaluation data.

        `state`: state of the checkpoint that is resumed; None starts at the beginning of the data.
        """
        saved, source, mode = self.config.debug.load_debug_rollout_data, self.data.source, self.config.rollout.async_mode
        activity: Activity | None = None
        if saved is not None:
            method, evaluator = SavedRollouts(saved, vocab_size=vocab_size(self.config)), None
        elif isinstance(source, ConversationSource):
            method, evaluator = SupervisedRollouts(source, batch_size=self.config.rollout.rollout_batch_size), None
            if self.engines is not None:
                evaluator = build_eval_only(self.config, self.engines.group, self.data.tokenizer, self.policy_version, self.stack)
        else:
            method, activity, evaluator = self._sampled(source)
        if state is not None:
            method.restore(state)
        monitor, profiler, steps = None, None, tuple(self.config.observability.profile or ())
        if self.engines is not None:
            monitor = self.engines.monitor
            if steps and self.config.engine_capabilities.writes_profiles:
                profiler = EngineProfiler(self.engines.group, steps, (self.run_dir / "profile").absolute())
        producer = RolloutProducer(method, phase=phase, activity=activity, monitor=monitor, profiler=profiler)
        rollouts = PacedRollouts(
            producer.produce,
            start=start,
            stop=self.data.num_rollout,
            mode="sync" if mode == "full" and activity is None else mode,
            before_sync=method.before_sync if isinstance(method, ContinuousRunner) else lambda: None,
            policy_version=None if activity is None else self.policy_version,
            end_early=end_early,
        )
        self.stack.push_async_callback(rollouts.close)
        return rollouts, evaluator

    def _sampled(self, prompts: PromptSource | None) -> tuple[RolloutMethod, Activity, Evaluates | None]:
        assert self.engines is not None, "validated: there are engines to sample from"
        reward = reward_runner(self.config)
        self.stack.push_async_callback(reward.close)
        group, tokenizer = self.engines.group, self.data.tokenizer
        sampling = build_sampling(
            self.config,
            prompts=prompts,
            engines=group,
            tokenizer=tokenizer,
            reward=reward,
            policy_version=self.policy_version,
            num_rollout=self.data.num_rollout,
            teacher=self.teacher,
        )
        self.stack.push_async_callback(sampling.generators.close)
        if isinstance(sampling.method, ContinuousRunner):
            self.stack.push_async_callback(sampling.method.close)
        evaluator = build_evaluator(
            self.config,
            engines=group,
            tokenizer=tokenizer,
            generate=sampling.generators.evaluation,
            reward=reward,
            policy_version=self.policy_version,
        )
        if evaluator is not None:
            self.stack.push_async_callback(evaluator.close)
        return sampling.method, sampling.activity, evaluator


def build_eval_only(
    config: Config, engines: EngineGroup, tokenizer: PreTrainedTokenizerBase, policy_version: Callable[[], int], stack: AsyncExitStack
) -> Evaluates | None:
    """Build the evaluator of a run that samples nothing else; return None without evaluation data."""
    reward = reward_runner(config)
    stack.push_async_callback(reward.close)
    generators = build_generators(config, engine=engines, tokenizer=tokenizer, policy_version=policy_version)
    stack.push_async_callback(generators.close)
    evaluator = build_evaluator(
        config, engines=engines, tokenizer=tokenizer, generate=generators.evaluation, reward=reward, policy_version=policy_version
    )
    if evaluator is not None:
        stack.push_async_callback(evaluator.close)
    return evaluator
