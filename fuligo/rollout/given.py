"""Rollouts that are not sampled: conversations of supervised fine-tuning, and rollouts of an earlier run."""

import asyncio
from dataclasses import KW_ONLY, dataclass, field

from fuligo.data.conversation import ConversationSource
from fuligo.rollout.debug_data import load_rollout
from fuligo.rollout.metrics import source_metrics
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.types import SampleGroup


@dataclass(eq=False)
class SupervisedRollouts:
    """Rollouts of given conversations in data order; the assistant's messages are the responses. Implements `RolloutMethod`."""

    source: ConversationSource
    _: KW_ONLY
    batch_size: int
    _next_index: int = field(default=0, init=False)

    def restore(self, state: RolloutState) -> None:
        self.source.restore(state.source)
        self._next_index = state.next_sample_index

    async def rollout(self, step: int) -> Rollout:
        """Return the next conversations, each a group of one trajectory."""
        conversations = self.source.take(self.batch_size)
        groups = [
            SampleGroup(index=index, row=conversation.row, samples=conversation.as_samples(index))
            for index, conversation in enumerate(conversations, self._next_index)
        ]
        self._next_index += len(groups)
        samples = [sample for group in groups for sample in group.samples]
        lengths = [sample.response_length for sample in samples]
        metrics = {
            "rollout/response_len_mean": sum(lengths) / len(lengths),
            "rollout/response_len_max": float(max(lengths)),
            "rollout/prompt_len_mean": sum(len(sample.prompt_ids) for sample in samples) / len(samples),
        }
        state = RolloutState(self.source.state(), next_sample_index=self._next_index, next_group_index=self._next_index)
        return Rollout(step, groups, state, metrics | source_metrics(state))


@dataclass(eq=False)
class SavedRollouts:
    """Rollouts that an earlier run saved (--load-debug-rollout-data). Implements `RolloutMethod`."""

    template: str
    _: KW_ONLY
    vocab_size: int | None
    """Vocabulary size of the model that is trained on the rollouts; None if unknown."""

    def restore(self, state: RolloutState) -> None:
        """Do nothing: the file of each rollout follows from its step."""

    async def rollout(self, step: int) -> Rollout:
        return await asyncio.to_thread(load_rollout, self.template, step, vocab_size=self.vocab_size)
