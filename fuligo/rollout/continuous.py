"""Sampling that never stops: groups are begun, judged and queued while the trainer works, and handed out as soon as a rollout is full."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from fuligo.errors import RolloutError
from fuligo.rollout.admission import Admission, Asked
from fuligo.rollout.dynamic_sampling import too_many_dropped
from fuligo.rollout.group_tasks import GroupTasks, frozen
from fuligo.rollout.judging import STALE, FailureWatch, drop_reason, judged
from fuligo.rollout.metrics import continuous_metrics, epoch_metric, sample_metrics
from fuligo.rollout.parts import RunnerParts
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.rollout.source import continuation, first_version
from fuligo.types import SampleGroup, SampleStatus


class ContinuousRunner:
    """Rollouts of `--async-mode full`; `rollout(step)` is called for one step after the other.

    A weight sync interrupts what is being generated, and it goes on with the new weights. No group with a token that is more than
    `--max-staleness` versions older than the weights that train on it is handed out: so few are begun that this is rare
    (`admission`), and where it happens, the group is dropped and its prompt returns to the data order.

    Args:
        parts: the buffer of its source stays empty
        admission: how many groups may be under way
    """

    def __init__(self, parts: RunnerParts, *, admission: Admission) -> None:
        self._parts = parts
        self._admission = admission
        self._tasks = GroupTasks(parts.sampler, parts.reward, parts.engines, parts.params, goes_on=lambda group: not self._is_stale(group))
        self._coming_version = 0
        self._asked: Asked | None = None
        self._next_step = 0
        self._restored: list[SampleGroup] = []
        self._failures = FailureWatch(parts.flags.rollout_batch_size)
        self._queue: dict[int, SampleGroup] = {}
        """Accepted groups by index."""
        self._since = _Interval()
        self._changed = asyncio.Event()
        self._sampling: asyncio.Task[None] | None = None

    def restore(self, state: RolloutState) -> None:
        """Go on with what was queued and in flight when the state was taken; before the first rollout."""
        self._parts.source.restore(replace(state, buffer=[]))
        self._restored = list(state.buffer)

    def before_sync(self) -> None:
        """The next version of the weights is about to be sent: groups that it makes too old do not go on."""
        self._coming_version = self._parts.policy_version() + 1

    async def rollout(self, step: int) -> Rollout:
        """The groups of rollout `step`, as soon as there are enough; those that began first where there are more.

        Raises:
            RolloutError: nearly everything is dropped, or fails.
            HookError: of the data source or a filter. Both may have happened while an earlier rollout was trained on.
        """
        self._next_step, self._asked = step, Asked(step, self._parts.policy_version())
        stale = [self._queue[index] for index in sorted(self._queue) if self._is_stale(self._queue[index])]
        for group in stale:
            del self._queue[group.index]
        self._drop_stale(stale)
        if self._sampling is None:
            self._sampling = self._begin()
        elif not self._sampling.done():
            self._admit()
        while len(filling := self._filling()) < self._parts.flags.rollout_batch_size:
            if self._sampling.done():
                self._sampling.result()
            self._changed.clear()
            await self._changed.wait()
        return self._hand_out(step, filling)

    async def close(self) -> None:
        """End all sampling; when this returns nothing of it runs any more."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    def _begin(self) -> asyncio.Task[None]:
        self._since = _Interval()
        sampling = asyncio.create_task(self._sample(), name="continuous sampling")
        sampling.add_done_callback(lambda _: self._changed.set())
        return sampling

    async def _sample(self) -> None:
        async with self._tasks:
            self._resume()
            while True:
                self._admit()
                self._changed.set()
                self._finish(await self._tasks.next_finished())

    def _resume(self) -> None:
        """What a checkpoint held: judged groups are queued, the others go on."""
        restored = [continuation(group, self._next_step, mask_offpolicy=False) for group in self._restored]
        self._restored = []
        for group in restored:
            self._since.num_tokens_before += _num_tokens(group)
        self._drop_stale([group for group in restored if self._is_stale(group)])
        for group in [group for group in restored if group.drop_reason != STALE]:
            if _is_judged(group):
                self._finish(group)
            else:
                self._tasks.start(group)

    def _admit(self) -> None:
        """Begin as many groups as staleness allows.

        Raises:
            RolloutError: the data source has no prompts left.
        """
        assert self._asked is not None, "sampling begins when the first rollout is asked for"
        num_under_way = len(self._queue) + self._tasks.num_running
        version = self._parts.policy_version()
        limit = self._admission.limit(next_step=self._next_step, asked=self._asked, version=version)
        if num_under_way >= limit:
            return
        drawn = self._parts.source.draw(limit - num_under_way, self._next_step, version).groups
        if not drawn and num_under_way < self._parts.flags.rollout_batch_size:
            raise RolloutError(f"rollout {self._next_step}: the data source has no prompts left")
        for group in drawn:
            self._tasks.start(group)

    def _finish(self, group: SampleGroup) -> None:
        """Queue a group, or drop it.

        Raises:
            RolloutError: too much was dropped since the last rollout.
        """
        if self._is_stale(group) or not group.finished:  # only what grew too old does not go on
            self._drop_stale([group])
            return
        reason = drop_reason(group, self._parts.flags.n_samples_per_prompt, self._parts.group_filter)
        self._failures.add(self._next_step, group, reason)
        if reason is None:
            self._queue[group.index] = group
            return
        self._drop(group, reason)
        self._refuse_to_go_on_for_ever()

    def _drop(self, group: SampleGroup, reason: str) -> None:
        group.kept, group.drop_reason = False, reason
        self._since.dropped.append(group)
        self._since.reasons[reason] += 1

    def _drop_stale(self, groups: list[SampleGroup]) -> None:
        """Their prompts are the next to be drawn."""
        for group in groups:
            self._drop(group, STALE)
        self._parts.source.put_back(groups)

    def _refuse_to_go_on_for_ever(self) -> None:
        size, reasons = self._parts.flags.rollout_batch_size, self._since.reasons
        num_dropped = reasons.total() - reasons[STALE]
        if len(self._queue) < size and num_dropped >= self._parts.flags.max_sampling_waves * size:
            self._failures.refuse_mass_failure(self._next_step)
            tried = f"{num_dropped + len(self._queue)} prompts (--max-sampling-waves {self._parts.flags.max_sampling_waves})"
            raise too_many_dropped(tried, len(self._queue), size, reasons)

    def _is_stale(self, group: SampleGroup) -> bool:
        """It would be trained by weights that are too new for its first token."""
        version = max(self._parts.policy_version(), self._coming_version)
        return first_version(group, version) < version - self._admission.max_staleness

    def _filling(self) -> list[SampleGroup]:
        """Queued groups that fill the rollout as things stand, those that began first.

        With `--sampling-order submission`, none before all that began earlier are judged.
        """
        indices = sorted(self._queue)
        if self._parts.flags.sampling_order == "submission":
            first_running = self._tasks.first_running
            indices = [index for index in indices if first_running is None or index < first_running]
        return [self._queue[index] for index in indices[: self._parts.flags.rollout_batch_size]]

    def _hand_out(self, step: int, kept: list[SampleGroup]) -> Rollout:
        """Take a rollout out of the queue, with all that was dropped since the last one."""
        for group in kept:
            del self._queue[group.index]
        num_tokens_left = sum(_num_tokens(group) for group in [*self._queue.values(), *self._tasks.standing()])
        since, self._since = self._since, _Interval(num_tokens_before=num_tokens_left)
        self._next_step = step + 1
        groups = sorted([*kept, *since.dropped], key=lambda group: group.index)
        num_tokens = sum(map(_num_tokens, groups)) + num_tokens_left - since.num_tokens_before
        if self._parts.sample_filter is not None:
            self._parts.sample_filter(kept)
        assert self._asked is not None
        metrics = sample_metrics(groups, reward_key=self._parts.reward_key, policy_version=self._asked.version)
        metrics |= continuous_metrics(
            groups,
            reasons=since.reasons,
            num_queued=len(self._queue),
            num_in_flight=self._tasks.num_running,
            num_tokens=num_tokens,
            elapsed_s=time.monotonic() - since.began_s,
            reward_key=self._parts.reward_key,
        )
        state = self._state(step)
        return Rollout(step, groups, state, metrics | epoch_metric(state))

    def _state(self, step: int) -> RolloutState:
        """With what is queued and in flight, as it stands now."""
        queued = [SampleGroup(group.index, group.row, list(map(frozen, group.samples))) for group in self._queue.values()]
        under_way = sorted([*queued, *self._tasks.standing()], key=lambda group: group.index)
        return replace(self._parts.source.state(step), buffer=under_way)


@dataclass(slots=True)
class _Interval:
    """From one hand-out to the next."""

    dropped: list[SampleGroup] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """How many were dropped for each."""
    num_tokens_before: int = 0
    """Response tokens of what was queued and in flight when it began."""
    began_s: float = field(default_factory=time.monotonic)


def _num_tokens(group: SampleGroup) -> int:
    return sum(sample.response_length for sample in group.samples)


def _is_judged(group: SampleGroup) -> bool:
    """It was rewarded before the checkpoint."""
    failed = [sample for sample in group.samples if sample.status is SampleStatus.FAILED]
    return len(judged(group.samples)) + len(failed) == len(group.samples)
