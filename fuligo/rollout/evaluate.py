"""Evaluation on held-out prompts, several samples each. It changes neither the counters nor the order of the training data."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import RolloutError
from fuligo.rollout.group_tasks import GroupTasks, aligned_start
from fuligo.rollout.judging import judged
from fuligo.rollout.metrics import prompt_scores, reported_means
from fuligo.rollout.protocol import GenerateFn, RewardFn
from fuligo.rollout.sampler import Sampler, Turns
from fuligo.rollout.source import new_group
from fuligo.types import Prompt, SampleGroup, SampleStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class EvalSet:
    """One dataset with its sampling parameters and reward."""

    name: str
    prompts: Sequence[Prompt]
    num_samples: int
    params: SamplingParams
    reward: RewardFn
    reward_key: str | None = None
    """Key of dict rewards to report; None if rewards are numbers."""


@dataclass(slots=True)
class Evaluation:
    """Result of one evaluation."""

    metrics: dict[str, float]
    """Metrics `eval/<name>/*` of every dataset."""
    groups: dict[str, list[SampleGroup]] = field(repr=False)
    reward_keys: dict[str, str | None] = field(default_factory=dict)
    """Key of dict rewards that is reported, by dataset; None for scalar rewards."""


class Evaluates(Protocol):
    """Evaluation of the current weights: `Evaluator`, or a user's function (`custom_rollout.CustomEvaluator`)."""

    async def evaluate(self, rollout_id: int) -> Evaluation:
        """Evaluate the weights after `rollout_id` rollouts."""
        ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class Evaluator:
    """Evaluator that samples every set with the current weights of the engines. A sample has the same seed in every evaluation.

    Rollouts may be sampled concurrently: samples whose requests are aborted at the end of a rollout are continued.
    """

    sets: Sequence[EvalSet]
    generate: GenerateFn
    engines: EngineGroup
    _: KW_ONLY
    seed: int
    """Value of --rollout-seed."""
    concurrency: int
    """Samples generated at a time, over all sets."""
    timeout_s: float
    """Timeout of one sample's generation."""
    aligned: bool = False
    """True to pause the engines until all requests of a batch have arrived, so that equal seeds give bitwise equal tokens."""
    on_close: Sequence[Callable[[], Awaitable[None]]] = ()
    """Functions that close the rewards of the datasets."""

    async def close(self) -> None:
        """Close the rewards of the datasets."""
        for close in self.on_close:
            await close()

    async def evaluate(self, rollout_id: int = 0) -> Evaluation:
        """Sample and judge every set, always with the same prompts and seeds. Raises RolloutError if no sample of a set has a reward."""
        turns = Turns(self.concurrency)
        if self.aligned:
            groups = [await self._sample(eval_set, turns) for eval_set in self.sets]
        else:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._sample(eval_set, turns)) for eval_set in self.sets]
            groups = [task.result() for task in running]
        evaluation = Evaluation({}, {})
        for eval_set, of_set in zip(self.sets, groups, strict=True):
            evaluation.groups[eval_set.name] = of_set
            evaluation.reward_keys[eval_set.name] = eval_set.reward_key
            evaluation.metrics |= eval_metrics(eval_set.name, eval_set.num_samples, eval_set.reward_key, of_set)
        return evaluation

    async def _sample(self, eval_set: EvalSet, turns: Turns) -> list[SampleGroup]:
        groups = [new_group(prompt, position, eval_set.num_samples) for position, prompt in enumerate(eval_set.prompts)]
        sampler = Sampler(self.generate, seed=self.seed, stream=f"eval/{eval_set.name}", turns=turns, timeout_s=self.timeout_s)
        async with GroupTasks(sampler, eval_set.reward, self.engines, eval_set.params) as tasks:
            for batch in self._batches(groups, eval_set.num_samples):
                async with aligned_start(self.engines, batch) if self.aligned else nullcontext():
                    for group in batch:
                        tasks.start(group)
                while not tasks.idle:
                    group = await tasks.next_finished()
                    if not group.finished:
                        tasks.start(group)
        return groups

    def _batches(self, groups: list[SampleGroup], num_samples: int) -> Iterator[list[SampleGroup]]:
        """Yield all groups at once or, for an aligned start, in batches of at most `concurrency` samples."""
        size = max(1, self.concurrency // num_samples) if self.aligned else len(groups)
        for first in range(0, len(groups), size):
            yield groups[first : first + size]


def eval_metrics(name: str, num_samples: int, reward_key: str | None, groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return a dataset's metrics: prompt scores, reward parts, response length and truncation. Failed samples count in `num_failed` only.

    Raises RolloutError if no sample was judged.
    """
    judged_groups = [samples for group in groups if (samples := judged(group.samples))]
    samples = [sample for group in judged_groups for sample in group]
    failures = [sample for group in groups for sample in group.samples if sample.status is SampleStatus.FAILED]
    if not samples:
        if not failures:
            raise RolloutError(f"evaluation {name}: no sample has a reward")
        (error, count), *_ = Counter(sample.error for sample in failures).most_common(1)
        raise RolloutError(f"evaluation {name}: no sample has a reward; the most frequent error: {count} x {error}")
    metrics = prompt_scores(judged_groups, num_samples, reward_key) | reported_means(samples)
    metrics["response_len_mean"] = float(np.mean([sample.response_length for sample in samples]))
    metrics["truncated_ratio"] = float(np.mean([sample.status is SampleStatus.TRUNCATED for sample in samples]))
    metrics["num_failed"] = len(failures)
    metrics["num_judge_timeouts"] = sum(sample.judge_error is not None for sample in samples)
    return {f"eval/{name}/{metric}": float(value) for metric, value in metrics.items()}
