"""Continuous sampling (`--async-mode full`): groups are sampled, judged and queued while the trainer works."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from fuligo.errors import RolloutError
from fuligo.quantities import count
from fuligo.rollout.dynamic_sampling import HOPELESS_GROUPS, HOPELESS_ROLLOUTS, too_many_dropped
from fuligo.rollout.group_tasks import GroupTasks, snapshot
from fuligo.rollout.judging import STALE, FailureWatch, drop_reason, explain_drops, judged
from fuligo.rollout.metrics import continuous_metrics
from fuligo.rollout.protocol import Rollout, RolloutState, UnfilledRolloutError
from fuligo.rollout.runner import RunnerParts
from fuligo.rollout.source import continuation, first_version
from fuligo.types import SampleGroup, SampleStatus


@dataclass(slots=True, frozen=True)
class Request:
    """Trainer's request for rollout `step`; the weights of `version`, which the engines had at the request, are trained on it."""

    step: int
    version: int


@dataclass(slots=True, frozen=True)
class Admission:
    """Limit on the groups that may have begun, so that none is too stale when it is trained on.

    It assumes that groups are trained on in the order in which they began, `batch_size` per rollout; the version of the weights rises after
    every `update_interval` rollouts. A group may therefore begin at version v only if its place in the queue belongs to a rollout that is
    trained on at version v + K or earlier. With an update after every rollout this is the rule of AReaL (arXiv:2505.24298,
    staleness-aware training): number of groups begun <= (version + K + 1) * batch size.
    """

    batch_size: int
    max_staleness: int
    """K, in versions."""
    update_interval: int
    """Rollouts between weight syncs."""
    num_rollout: int
    """Rollouts of the whole run; nothing begins for later ones."""

    def limit(self, *, next_step: int, request: Request, version: int) -> int:
        """Return how many groups may be in flight or queued for training.

        `next_step` is the first rollout that has not been handed out, `version` that of the weights in the engines.
        """
        last_epoch = version + self.max_staleness - request.version + request.step // self.update_interval
        num_steps = min(self.update_interval * (last_epoch + 1), self.num_rollout) - next_step
        return self.batch_size * max(0, num_steps)


class ContinuousRunner:
    """Runner of the rollouts of `--async-mode full`. Implements `RolloutMethod`.

    A weight sync interrupts generation, which continues with the new weights. No group is handed out with a token that is more than
    `--max-staleness` versions older than the weights that are trained on it. `Admission` makes such groups rare; they are dropped, and
    their prompts are drawn again.

    Args:
        parts: see `RunnerParts`; `parts.source` takes back the prompts of stale groups and does not buffer groups
        admission: limit on the groups in flight and queued
    """

    def __init__(self, parts: RunnerParts, *, admission: Admission) -> None:
        self._parts = parts
        self._admission = admission
        self._tasks = GroupTasks(
            parts.sampler, parts.reward, parts.engines, parts.params, may_continue=lambda group: not self._is_stale(group)
        )
        self._coming_version = 0
        self._request: Request | None = None
        self._next_step = 0
        self._restored: list[SampleGroup] = []
        self._failures = FailureWatch(parts.flags.rollout_batch_size)
        self._queue: dict[int, SampleGroup] = {}
        """Kept groups that have not been handed out, by index."""
        self._since = _Interval()
        self._changed = asyncio.Event()
        self._sampling: asyncio.Task[None] | None = None

    def restore(self, state: RolloutState) -> None:
        """Continue the groups that were queued and in flight when the state was taken; call it before the first rollout."""
        self._parts.source.restore(replace(state, buffer=[]))
        self._restored = list(state.buffer)

    def before_sync(self) -> None:
        """Announce the next version of the weights, so that groups that it makes too stale are not continued."""
        self._coming_version = self._parts.policy_version() + 1

    async def rollout(self, step: int) -> Rollout:
        """Wait for enough groups and return those that began first.

        Raises RolloutError if nearly every group is dropped or fails, or no prompts are left, possibly during the training of an earlier
        rollout.
        """
        self._next_step, self._request = step, Request(step, self._parts.policy_version())
        stale = [self._queue[index] for index in sorted(self._queue) if self._is_stale(self._queue[index])]
        for group in stale:
            del self._queue[group.index]
        self._drop_stale(stale)
        if self._sampling is None:
            self._since = _Interval()
            self._sampling = asyncio.create_task(self._sample(), name="continuous sampling")
            self._sampling.add_done_callback(lambda _: self._changed.set())
        elif not self._sampling.done():
            self._admit()
        while len(filling := self._filling()) < self._parts.flags.rollout_batch_size:
            if self._sampling.done():
                self._sampling.result()
            self._changed.clear()
            await self._changed.wait()
        return self._hand_out(step, filling)

    async def close(self) -> None:
        """Cancel all sampling and wait until it has ended."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    async def _sample(self) -> None:
        async with self._tasks:
            self._resume()
            while True:
                self._admit()
                self._changed.set()
                self._finish(await self._tasks.next_finished())

    def _resume(self) -> None:
        """Queue the checkpoint's judged groups, and continue its unfinished ones."""
        restored = [continuation(group, self._next_step, mask_offpolicy=False) for group in self._restored]
        self._restored = []
        for group in restored:
            self._since.num_tokens_before += _num_tokens(group)
        self._drop_stale([group for group in restored if self._is_stale(group)])
        for group in [group for group in restored if group.drop_reason != STALE]:
            failed = [sample for sample in group.samples if sample.status is SampleStatus.FAILED]
            if len(judged(group.samples)) + len(failed) == len(group.samples):  # judged before the checkpoint
                self._finish(group)
            else:
                self._tasks.start(group)

    def _admit(self) -> None:
        """Start as many groups as `Admission` allows. Raises RolloutError if too few prompts are left to fill the rollout."""
        assert self._request is not None, "sampling starts with the first request"
        num_pending = len(self._queue) + self._tasks.num_running
        version = self._parts.policy_version()
        limit = self._admission.limit(next_step=self._next_step, request=self._request, version=version)
        if num_pending >= limit:
            return
        drawn = self._parts.source.draw(limit - num_pending, self._next_step, version).groups
        if not drawn and num_pending < self._parts.flags.rollout_batch_size:
            raise RolloutError(
                f"cannot fill rollout {self._next_step}: the data source has no prompts left; lower --num-rollout or provide more prompts"
            )
        for group in drawn:
            self._tasks.start(group)

    def _finish(self, group: SampleGroup) -> None:
        """Queue a group, or drop it. Raises RolloutError if too many groups were dropped since the last rollout."""
        if self._is_stale(group) or not group.finished:  # only groups that became too old stop unfinished
            self._drop_stale([group])
            return
        reason = drop_reason(group, self._parts.flags.n_samples_per_prompt, self._parts.group_filter)
        self._failures.add(self._next_step, group, reason)
        if reason is None:
            self._queue[group.index] = group
            return
        self._drop(group, reason)
        self._check_drops()

    def _drop(self, group: SampleGroup, reason: str) -> None:
        group.kept, group.drop_reason = False, reason
        self._since.dropped.append(group)
        self._since.reasons[reason] += 1

    def _drop_stale(self, groups: list[SampleGroup]) -> None:
        """Drop groups that are too stale; their prompts are drawn again next."""
        for group in groups:
            self._drop(group, STALE)
        self._parts.source.put_back(groups)

    def _check_drops(self) -> None:
        """Raise RolloutError if so many groups failed or were dropped that sampling should give up."""
        size, reasons = self._parts.flags.rollout_batch_size, self._since.reasons
        num_dropped = reasons.total() - reasons[STALE]
        hopeless = not self._queue and num_dropped >= max(HOPELESS_ROLLOUTS * size, HOPELESS_GROUPS)
        if hopeless or (len(self._queue) < size and num_dropped >= self._parts.flags.max_sampling_waves * size):
            self._failures.refuse_mass_failure(self._next_step)
            tried = f"{count(num_dropped + len(self._queue), 'prompt')} (--max-sampling-waves {self._parts.flags.max_sampling_waves})"
            details = explain_drops(self._since.dropped, self._parts.reward_key)
            error = too_many_dropped(tried, len(self._queue), size, reasons, details)
            raise UnfilledRolloutError(str(error), self._next_step, self._since.dropped)

    def _is_stale(self, group: SampleGroup) -> bool:
        """Return whether the group's oldest token is more than `max_staleness` versions behind the newest known weights."""
        version = max(self._parts.policy_version(), self._coming_version)
        return first_version(group, version) < version - self._admission.max_staleness

    def _filling(self) -> list[SampleGroup]:
        """Return the queued groups that fill the rollout so far, in the order in which they began.

        With `--sampling-order submission`, a group counts only after all groups that began earlier are judged.
        """
        indices = sorted(self._queue)
        if self._parts.flags.sampling_order == "submission":
            first_running = self._tasks.first_running
            indices = [index for index in indices if first_running is None or index < first_running]
        return [self._queue[index] for index in indices[: self._parts.flags.rollout_batch_size]]

    def _hand_out(self, step: int, kept: list[SampleGroup]) -> Rollout:
        """Remove the groups of a rollout from the queue and return them, with the groups dropped since the previous rollout."""
        for group in kept:
            del self._queue[group.index]
        num_tokens_left = sum(_num_tokens(group) for group in [*self._queue.values(), *self._tasks.snapshots()])
        since, self._since = self._since, _Interval(num_tokens_before=num_tokens_left)
        self._next_step = step + 1
        groups = sorted([*kept, *since.dropped], key=lambda group: group.index)
        num_tokens = sum(map(_num_tokens, groups)) + num_tokens_left - since.num_tokens_before
        assert self._request is not None
        self._parts.finish(step, self._request.version, groups)
        counts = continuous_metrics(
            groups,
            reasons=since.reasons,
            num_queued=len(self._queue),
            num_in_flight=self._tasks.num_running,
            num_tokens=num_tokens,
            elapsed_s=time.monotonic() - since.start_s,
            reward_key=self._parts.reward_key,
        )
        rollout = self._parts.rollout(step, groups, self._request.version, counts)
        rollout.state = replace(rollout.state, buffer=self._pending())
        return rollout

    def _pending(self) -> list[SampleGroup]:
        """Return copies of the groups that are queued and in flight, ordered by index."""
        queued = [SampleGroup(group.index, group.row, list(map(snapshot, group.samples))) for group in self._queue.values()]
        return sorted([*queued, *self._tasks.snapshots()], key=lambda group: group.index)


@dataclass(slots=True)
class _Interval:
    """Interval between two rollouts."""

    dropped: list[SampleGroup] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    num_tokens_before: int = 0
    """Response tokens of the groups that were queued and in flight when the interval began."""
    start_s: float = field(default_factory=time.monotonic)


def _num_tokens(group: SampleGroup) -> int:
    return sum(sample.response_length for sample in group.samples)
