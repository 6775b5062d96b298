"""Rollouts sampled one at a time: waves of prompts are sampled, rewarded and filtered concurrently until enough groups are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from fuligo.config.groups import RolloutFlags
from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import RolloutError
from fuligo.rollout.dynamic_sampling import DynamicSampling
from fuligo.rollout.filters import AllSamples, SampleFilter
from fuligo.rollout.group_tasks import GroupTasks, aligned_start
from fuligo.rollout.judging import ABORTED, SURPLUS, FailureWatch, drop_reason, equal_rewards, explain_drops
from fuligo.rollout.metrics import RolloutCounts, sample_metrics, sampling_metrics, source_metrics
from fuligo.rollout.protocol import Draw, GroupFilter, GroupStream, RewardFn, Rollout, RolloutState, UnfilledRolloutError
from fuligo.rollout.sampler import Sampler
from fuligo.rollout.source import DataSource
from fuligo.types import SampleGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerParts:
    """Parts of a `RolloutRunner`, `ContinuousRunner` or `CustomRollout`."""

    source: GroupStream
    sampler: Sampler
    reward: RewardFn
    """Reward that judges the samples of a finished group."""
    engines: EngineGroup
    params: SamplingParams
    flags: RolloutFlags
    concurrency: int
    """Largest number of samples generated at a time."""
    reward_key: str | None = None
    """Key of dict rewards that the metrics report; None if rewards are numbers."""
    pass_key: str | None = None
    """Key of dict rewards that decides whether a sample passes, as in evaluations; None if rewards are numbers."""
    group_filter: GroupFilter | None = None
    """Filter that keeps or drops a finished group (dynamic sampling); None: keep all."""
    sample_filter: SampleFilter | None = None
    """Hook that sees the kept groups of a rollout and changes their samples in place; None: no hook."""
    all_samples: AllSamples | None = None
    """Hook that sees all groups of a rollout, including dropped ones, after the sample filter; None: no hook."""
    policy_version: Callable[[], int] = lambda: 0

    def finish(self, step: int, version: int, groups: list[SampleGroup]) -> None:
        """Call the hooks that see all groups of a rollout. `version` is that of the weights when the rollout was requested."""
        if self.sample_filter is not None:
            self.sample_filter([group for group in groups if group.kept])
        if self.all_samples is not None:
            self.all_samples(groups, DataSource(self.source, step, version, groups))

    def rollout(self, step: int, groups: list[SampleGroup], version: int, counts: Mapping[str, float] | None = None) -> Rollout:
        """Return a complete rollout with its metrics, to which `counts` are added, and the state of the source after it."""
        metrics = sample_metrics(groups, reward_key=self.reward_key, pass_key=self.pass_key, policy_version=version)
        state = self.source.state(step)
        return Rollout(step, groups, state, metrics | dict(counts or {}) | source_metrics(state))


class RolloutRunner:
    """Runner that samples rollouts from a `GroupStream`, one at a time. Implements `RolloutMethod`.

    With `aligned_waves`, engines pause until a whole wave has arrived, so that equal seeds give bitwise equal tokens.
    """

    def __init__(self, parts: RunnerParts, *, aligned_waves: bool = False) -> None:
        self._parts = parts
        self._failures = FailureWatch(parts.flags.rollout_batch_size)
        wave_requests = self._wave_size * parts.flags.n_samples_per_prompt
        self._aligned_waves = aligned_waves and wave_requests <= parts.concurrency
        if aligned_waves and not self._aligned_waves:
            logger.warning(
                "a wave has %d requests, but --rollout-concurrency is %d: the run is not bitwise reproducible; raise --rollout-concurrency",
                wave_requests,
                parts.concurrency,
            )

    @property
    def _wave_size(self) -> int:
        return self._parts.flags.over_sampling_batch_size or self._parts.flags.rollout_batch_size

    def restore(self, state: RolloutState) -> None:
        self._parts.source.restore(state)

    async def rollout(self, step: int) -> Rollout:
        """Sample rollout `step`.

        Raises RolloutError if all waves are used up, or nearly all groups failed; unfinished groups are then back in the source.
        """
        started_s = time.monotonic()
        sampling = DynamicSampling(
            self._parts.flags.rollout_batch_size,
            self._wave_size,
            self._parts.flags.max_sampling_waves,
            in_submission_order=self._parts.flags.sampling_order == "submission",
        )
        run = _Run(step, self._parts.policy_version(), sampling)
        failure: RolloutError | None = None
        async with GroupTasks(self._parts.sampler, self._parts.reward, self._parts.engines, self._parts.params) as tasks:
            try:
                await self._fill(run, tasks)
            except RolloutError as error:
                failure = error
            unfinished = [group for group in await tasks.stop() if not group.finished]
        run.aborted = sorted(unfinished, key=lambda group: group.index)
        self._parts.source.put_back(run.aborted)
        if failure is not None:
            groups = run.mark_kept(kept=())
            raise UnfilledRolloutError(str(failure), step, groups) from failure
        run.counts.elapsed_s = time.monotonic() - started_s
        groups = run.mark_kept(sampling.chosen())
        self._parts.finish(step, run.version, groups)
        counts = sampling_metrics(groups, run.aborted, sampling, run.counts, self._parts.reward_key)
        return self._parts.rollout(step, groups, run.version, counts)

    async def _fill(self, run: _Run, tasks: GroupTasks) -> None:
        """Submit waves and judge finished groups until the rollout is complete."""
        while not run.sampling.complete:
            if run.sampling.needs_wave:
                run.log_wave(self._parts.reward_key)
                if run.sampling.exhausted:
                    self._failures.refuse_mass_failure(run.step)
                run.sampling.begin_wave(lambda: explain_drops(run.dropped(), self._parts.reward_key))
                await self._start_wave(run, tasks)
            group = await tasks.next_finished()
            reason = drop_reason(group, self._parts.flags.n_samples_per_prompt, self._parts.group_filter)
            run.sampling.finish(group.index, reason)
            self._failures.add(run.step, group, reason)

    async def _start_wave(self, run: _Run, tasks: GroupTasks) -> None:
        draw = self._parts.source.draw(self._wave_size, run.step, run.version)
        if not draw.groups:
            raise RolloutError(
                f"cannot fill rollout {run.step}: the data source has no prompts left; lower --num-rollout or provide more prompts"
            )
        run.add(draw)
        aligned = self._aligned_waves and tasks.idle
        async with aligned_start(self._parts.engines, draw.groups) if aligned else nullcontext():
            for group in draw.groups:
                tasks.start(group)


@dataclass(slots=True)
class _Run:
    """Rollout in progress."""

    step: int
    version: int
    sampling: DynamicSampling
    groups: dict[int, SampleGroup] = field(default_factory=dict)
    aborted: list[SampleGroup] = field(default_factory=list)
    counts: RolloutCounts = field(default_factory=RolloutCounts)

    def mark_kept(self, kept: Collection[int]) -> list[SampleGroup]:
        """Mark every drawn group as kept, or as dropped with its reason; return all of them ordered by index."""
        aborted = {group.index for group in self.aborted}
        for index, group in self.groups.items():
            group.kept = index in kept
            if not group.kept:
                group.drop_reason = self.sampling.dropped.get(index, ABORTED if index in aborted else SURPLUS)
        return [self.groups[index] for index in sorted(self.groups)]

    def dropped(self) -> list[SampleGroup]:
        """Return the groups that were dropped so far."""
        return [self.groups[index] for index in self.sampling.dropped]

    def log_wave(self, reward_key: str | None) -> None:
        """Log how many groups the waves have kept so far, as a warning if there are none."""
        sampling = self.sampling
        if sampling.num_waves == 0:
            return
        alike = equal_rewards(self.dropped(), reward_key)
        logger.log(
            logging.INFO if sampling.num_kept else logging.WARNING,
            "rollout %d after wave %d: kept %d of %d groups, dropped %d%s",
            self.step,
            sampling.num_waves,
            sampling.num_kept,
            sampling.target,
            len(sampling.dropped),
            f" ({alike})" if alike else "",
        )

    def add(self, draw: Draw) -> None:
        self.sampling.submit(group.index for group in draw.groups)
        self.groups.update((group.index, group) for group in draw.groups)
        begun = [sample for group in draw.groups for sample in group.samples if sample.response_length]
        self.counts.num_stale += draw.num_stale
        self.counts.num_resumed += sum(not sample.finished for sample in begun)
        self.counts.num_tokens_before += sum(sample.response_length for sample in begun)
