"""From the configuration to the stream of rollouts: sampled, given by supervised data, or loaded from an earlier run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuligo.config import Config
from fuligo.data.conversation import ConversationDataset, ConversationSource
from fuligo.data.dataset import PromptDataset
from fuligo.data.settings import data_settings
from fuligo.data.source import PromptSource
from fuligo.engines.group import EngineGroup
from fuligo.rollout.build import RolloutSide, build_evaluator, build_generate, build_rollouts, vocab_size
from fuligo.rollout.debug_data import load_rollout
from fuligo.rollout.evaluate import Evaluator
from fuligo.rollout.modes import PacedRollouts
from fuligo.rollout.protocol import GenerateFn, RewardFn, Rollout, RolloutState
from fuligo.rollout.rewards import reward_runner
from fuligo.rollout.supervised import SupervisedRollouts
from fuligo.rollout.teacher import ServedTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PhaseTimer = Callable[[str, int], AbstractContextManager[object]]


@dataclass(slots=True, frozen=True)
class Stream:
    """Where rollouts come from, and what evaluates between them."""

    produce: Callable[[int], Awaitable[Rollout]]
    """Makes the rollout of a step."""
    evaluator: Evaluator | None = None
    side: RolloutSide | None = None
    """What samples; None where rollouts are given."""

    def rollouts(self, config: Config, *, start: int, num_rollout: int, phase: PhaseTimer) -> PacedRollouts:
        async def timed(step: int) -> Rollout:
            if self.side is not None and step == start:
                self.side.activity.take_idle_fraction()  # what went before is no part of a step
            with phase("rollout", step):
                rollout = await self.produce(step)
            if self.side is not None:
                rollout.metrics["perf/engine_idle_fraction"] = self.side.activity.take_idle_fraction()
            return rollout

        mode, side = config.rollout.async_mode, self.side
        if side is None:  # what is given comes when asked for
            return PacedRollouts(timed, start=start, stop=num_rollout, mode="one-step" if mode == "one-step" else "sync")
        before_sync = (lambda: None) if side.continuous is None else side.continuous.before_sync
        return PacedRollouts(timed, start=start, stop=num_rollout, mode=mode, before_sync=before_sync, policy_version=side.policy_version)


@dataclass(slots=True, frozen=True)
class StreamBuilder:
    """Makes the stream once the engines are there; the data are open before."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    source: PromptSource | ConversationSource | None
    """None with `--data-source-path` and with saved rollouts."""

    @classmethod
    def open(cls, config: Config, state: RolloutState | None = None) -> StreamBuilder:
        """Load the tokenizer and index the data.

        Args:
            state: what a checkpoint will be resumed from.

        Raises:
            DataError: the data are missing or malformed, or not those of the checkpoint; nothing else is loaded yet.
        """
        from transformers import AutoTokenizer

        assert config.model.hf_checkpoint is not None, "validated"
        tokenizer = AutoTokenizer.from_pretrained(config.model.hf_checkpoint)
        path = config.data.prompt_data
        if path is None or config.debug.load_debug_rollout_data is not None:
            return cls(config, tokenizer, None)
        if config.is_sft:
            source = ConversationSource(ConversationDataset.open(path, data_settings(config), tokenizer))
        else:
            source = PromptSource(PromptDataset.open(path, data_settings(config), tokenizer))
        if state is not None:
            source.check(state.source)
        return cls(config, tokenizer, source)

    @property
    def num_rollout(self) -> int:
        """Of the whole run."""
        return self.config.resolved_num_rollout(len(self.source) if self.source is not None else 0)

    def build(
        self,
        engines: EngineGroup | None,
        *,
        state: RolloutState | None,
        policy_version: Callable[[], int],
        stack: AsyncExitStack,
        teacher: ServedTeacher | None = None,
    ) -> Stream:
        """
        Args:
            engines: None where nothing is sampled.
            teacher: scores what is sampled; None without one, and where the trainer has it.
            state: where a checkpoint left the data; None starts at its beginning.
            policy_version: of the weights in the engines.
            stack: closes what is opened.

        Raises:
            ConfigError, DataError, HookError: before anything is sampled.
        """
        if self.config.debug.load_debug_rollout_data is not None:
            return _loaded(self.config.debug.load_debug_rollout_data, vocab_size(self.config))
        if isinstance(self.source, ConversationSource):
            return self._supervised(self.source, engines, state, policy_version, stack)
        assert engines is not None, "validated: there are engines to sample from"
        reward = reward_runner(self.config)
        stack.push_async_callback(reward.close)
        side = build_rollouts(
            self.config,
            prompts=self.source,
            engines=engines,
            tokenizer=self.tokenizer,
            reward=reward,
            policy_version=policy_version,
            num_rollout=self.num_rollout,
            teacher=teacher,
        )
        if side.continuous is not None:
            stack.push_async_callback(side.continuous.close)
        if state is not None:
            side.restore(state)
        return Stream(side.produce, self._evaluator(engines, side.generate, reward, stack), side)

    def _supervised(
        self,
        source: ConversationSource,
        engines: EngineGroup | None,
        state: RolloutState | None,
        policy_version: Callable[[], int],
        stack: AsyncExitStack,
    ) -> Stream:
        """Engines serve the evaluation alone."""
        rollouts = SupervisedRollouts(source, batch_size=self.config.rollout.rollout_batch_size)
        if state is not None:
            rollouts.restore(state)
        if engines is None:
            return Stream(rollouts.rollout)
        reward = reward_runner(self.config)
        stack.push_async_callback(reward.close)
        generate = build_generate(self.config, engines=engines, tokenizer=self.tokenizer, policy_version=policy_version)
        return Stream(rollouts.rollout, self._evaluator(engines, generate, reward, stack))

    def _evaluator(self, engines: EngineGroup, generate: GenerateFn, reward: RewardFn, stack: AsyncExitStack) -> Evaluator | None:
        evaluator = build_evaluator(self.config, engines=engines, tokenizer=self.tokenizer, generate=generate, reward=reward)
        if evaluator is not None:
            stack.push_async_callback(evaluator.close)
        return evaluator


def _loaded(template: str, num_tokens: int | None) -> Stream:
    """--load-debug-rollout-data: what an earlier run saved, step by step."""

    async def produce(step: int) -> Rollout:
        return await asyncio.to_thread(load_rollout, template, step, vocab_size=num_tokens)

    return Stream(produce)
