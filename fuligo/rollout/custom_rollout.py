"""`--rollout-function-path`: `(args, rollout_id, data_source, evaluation=False)`, async or not, replaces the whole rollout."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from fuligo.config.hooks import describe_exception
from fuligo.engines.generation import SamplingParams
from fuligo.errors import RolloutError
from fuligo.rollout.custom_generate import complete, default_generate
from fuligo.rollout.metrics import epoch_metric, sample_metrics
from fuligo.rollout.protocol import GenerateFn, GroupStream, Rollout
from fuligo.rollout.sampler import failed, malformation
from fuligo.rollout.teacher import ServedTeacher
from fuligo.types import Sample, SampleGroup, SampleStatus


class DataSource:
    """What the function draws from: groups of fresh or unfinished samples."""

    def __init__(self, source: GroupStream, step: int, policy_version: int) -> None:
        self._source = source
        self._step = step
        self._policy_version = policy_version
        self.rows: dict[int, int] = {}
        """Row of the data set by group index."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` prompts, `--n-samples-per-prompt` samples each."""
        groups = self._source.draw(num_groups, self._step, self._policy_version).groups
        self.rows.update((group.index, group.row) for group in groups)
        return [group.samples for group in groups]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Groups that the rollout does not return: they are drawn again, with their tokens under `--partial-rollout`."""
        self._source.put_back([SampleGroup(samples[0].group_index, self.rows[samples[0].group_index], samples) for samples in groups])


class CustomRollout:
    """Rollouts that the user's function makes: a list of groups, each a list of finished samples with rewards.

    Inside it `custom_generate.continue_sample` lets the engine generate.

    Args:
        hook: the function
        args: read-only view of the flags
        source: what `data_source` draws from
        generate: what `continue_sample` does
        params: the run's sampling parameters
        policy_version: version of the weights in the engines
        reward_key: which value of a dict reward the metrics report
        vocab_size: of the model; None where it is not known
        teacher: scores what the function returned
    """

    def __init__(
        self,
        hook: Callable[..., Any],
        args: Any,
        *,
        source: GroupStream,
        generate: GenerateFn,
        params: SamplingParams,
        policy_version: Callable[[], int],
        reward_key: str | None = None,
        vocab_size: int | None = None,
        teacher: ServedTeacher | None = None,
    ) -> None:
        self._hook = hook
        self._args = args
        self._source = source
        self._generate = generate
        self._params = params
        self._policy_version = policy_version
        self._reward_key = reward_key
        self._vocab_size = vocab_size
        self._teacher = teacher

    async def rollout(self, step: int) -> Rollout:
        """
        Raises:
            RolloutError: the function raised, or returned something else than groups of samples.
        """
        version = self._policy_version()
        data_source = DataSource(self._source, step, version)
        try:
            with default_generate(self._generate, self._params):
                result = await self._call(step, data_source)
        except Exception as error:
            raise RolloutError(f"--rollout-function-path: in rollout {step} it raised {describe_exception(error, self._hook)}") from error
        groups = [_group(samples, version, data_source.rows, self._vocab_size) for samples in _checked(result)]
        groups.sort(key=lambda group: group.index)
        if self._teacher is not None:
            await asyncio.gather(*(self._teacher(group) for group in groups))
        metrics = sample_metrics(groups, reward_key=self._reward_key, policy_version=version)
        state = self._source.state(step)
        return Rollout(step, groups, state, metrics | epoch_metric(state))

    async def _call(self, step: int, data_source: DataSource) -> Any:
        if inspect.iscoroutinefunction(self._hook):
            return await self._hook(self._args, step, data_source, evaluation=False)
        return await asyncio.to_thread(self._hook, self._args, step, data_source, evaluation=False)


def _checked(result: Any) -> list[list[Sample]]:
    fits = isinstance(result, list) and result and all(isinstance(group, list) and group for group in result)
    if not fits or not all(isinstance(sample, Sample) for group in result for sample in group):
        raise RolloutError(f"--rollout-function-path must return a non-empty list of groups, each a list of Sample; got {result!r:.200}")
    return result


def _group(samples: list[Sample], version: int, rows: dict[int, int], vocab_size: int | None) -> SampleGroup:
    """Samples that cannot be learnt from are marked failed."""
    for sample in samples:
        try:
            complete(sample, version, vocab_size=vocab_size)
            problem = malformation(sample)
        except ValueError as error:
            problem = str(error)
        if problem is None and sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED):
            problem = f"the rollout function returned it {sample.status}"
        if problem is None and sample.reward is None and sample.status is not SampleStatus.FAILED:
            problem = "the rollout function returned it without a reward"
        if problem is not None:
            failed(sample, problem)
    index = samples[0].group_index
    return SampleGroup(index, rows.get(index, -1), samples)
