"""Concurrent sampling and rewarding of groups, which can be stopped without losing tokens or started aligned for reproducible waves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from types import TracebackType

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError
from fuligo.quantities import count
from fuligo.rollout.protocol import RewardFn
from fuligo.rollout.sampler import Sampler, clear_response, failed, malformation
from fuligo.types import Sample, SampleGroup

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.1
"""Seconds between aborts; each one catches requests that had not reached the engine at the previous one."""
ABORT_DEADLINE_S = 60.0
"""Seconds after which groups that ignore the abort are canceled; they continue later without the tokens of the request in flight."""


@dataclass(eq=False)
class GroupTasks:
    """Tasks that sample and reward groups. As an async context manager, it ends all tasks on exit, also after an error."""

    sampler: Sampler
    reward: RewardFn
    engines: EngineGroup
    params: SamplingParams
    _: KW_ONLY
    may_continue: Callable[[SampleGroup], bool] | None = None
    """Test of whether interrupted samples of a group continue at once. If it returns False or is None, `next_finished` returns the group
    unfinished."""
    _snapshots: dict[int, list[list[Sample]]] = field(default_factory=dict, init=False)
    """Copies of the samples by group index, taken when their last request was sent or ended; empty without `may_continue`."""
    _running: dict[asyncio.Task[None], SampleGroup] = field(default_factory=dict, init=False)
    _done: asyncio.Queue[asyncio.Task[None]] = field(default_factory=asyncio.Queue, init=False)

    async def __aenter__(self) -> GroupTasks:
        self.sampler.open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._cancel()

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def first_running(self) -> int | None:
        """Smallest index of the groups in flight; None if there is none."""
        return min((group.index for group in self._running.values()), default=None)

    def snapshots(self) -> list[SampleGroup]:
        """Return copies of the groups in flight, ordered by index, from which sampling can continue.

        A sample in generation is copied when its request is sent, because a user's function may be changing the original later.
        """
        groups = sorted(self._running.values(), key=lambda group: group.index)
        return [SampleGroup(group.index, group.row, _flat(self._snapshots[group.index])) for group in groups]

    def start(self, group: SampleGroup) -> None:
        if self.may_continue is not None:
            self._snapshots[group.index] = [[snapshot(sample)] for sample in group.samples]
        task = asyncio.create_task(self._run(group), name=f"group {group.index}")
        task.add_done_callback(self._done.put_nowait)
        self._running[task] = group

    async def next_finished(self) -> SampleGroup:
        """Return the next group whose generation has ended and, if all its samples finished, whose rewards are set."""
        task = await self._done.get()
        group = self._running.pop(task)
        self._snapshots.pop(group.index, None)
        task.result()
        return group

    async def stop(self) -> list[SampleGroup]:
        """Abort generation and cancel rewards; return the groups that were in flight."""
        self.sampler.close()
        for task, group in self._running.items():
            if group.finished:
                task.cancel()
        groups = list(self._running.values())
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                while any(not task.done() for task in self._running):
                    await self.engines.abort_all()
                    await asyncio.wait(self._running, timeout=ABORT_AGAIN_S)
        except TimeoutError:
            waiting = sum(not task.done() for task in self._running)
            logger.warning("canceling %s that did not return within %g s of the abort", count(waiting, "group"), ABORT_DEADLINE_S)
        await self._cancel()
        return groups

    async def _run(self, group: SampleGroup) -> None:
        parts = [[sample] for sample in group.samples]
        try:
            await asyncio.gather(*(self._continue(group, position, part) for position, part in enumerate(parts)))
        finally:
            group.samples = _flat(parts)
        if group.finished and self.sampler.open:
            await self._judge(group)

    async def _continue(self, group: SampleGroup, position: int, part: list[Sample]) -> None:
        """Replace an unfinished sample by its continuation."""
        if part[0].finished:
            return
        if self.may_continue is None:
            part[:] = await self.sampler.sample(part[0], self.params)
            return
        group_may_continue = self.may_continue

        def may_continue(samples: Sequence[Sample]) -> bool:
            self._snapshots[group.index][position] = [snapshot(sample) for sample in samples]
            return group_may_continue(group)

        part[:] = await self.sampler.sample(part[0], self.params, may_continue)
        self._snapshots[group.index][position] = [snapshot(sample) for sample in part]

    async def _judge(self, group: SampleGroup) -> None:
        try:
            await self.reward(group)
        except Exception as error:
            logger.warning("the reward of group %d raised; marking its samples failed", group.index, exc_info=True)
            for sample in group.samples:
                failed(sample, f"the reward raised {type(error).__name__}: {error}")

    async def _cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = dict(self._running)
        self._running.clear()
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        self._snapshots.clear()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        for sample in (sample for group in tasks.values() for sample in group.samples):
            if not sample.finished and malformation(sample) is not None:
                clear_response(sample)


def snapshot(sample: Sample) -> Sample:
    """Copy a sample that generation continues. Of its arrays only the mask is copied: generation replaces the others."""
    return replace(
        sample,
        metadata=deepcopy(sample.metadata),
        loss_mask=sample.loss_mask.copy(),
        spans=list(sample.spans),
        episode=deepcopy(sample.episode),
    )


def _flat(parts: list[list[Sample]]) -> list[Sample]:
    return [sample for part in parts for sample in part]


POLL_S = 0.001
ARRIVAL_DEADLINE_S = 60.0


@asynccontextmanager
async def aligned_start(engines: EngineGroup, groups: Sequence[SampleGroup]) -> AsyncIterator[None]:
    """Pause idle engines while the body starts the groups, and until all their requests have arrived: the batches are then reproducible."""
    before = await _num_arrived(engines)
    await engines.pause("in_place")
    try:
        yield
        deadline = time.monotonic() + ARRIVAL_DEADLINE_S
        while (missing := _num_unfinished(groups) - (await _num_arrived(engines) - before)) > 0:
            if time.monotonic() > deadline:
                late = count(missing, "request")
                logger.warning("%s did not arrive within %g s: this wave is not bitwise reproducible", late, ARRIVAL_DEADLINE_S)
                break
            await asyncio.sleep(POLL_S)
    finally:
        await engines.resume()


def _num_unfinished(groups: Sequence[SampleGroup]) -> int:
    """Count the samples that send a request; samples that need none (no tokens left, failed) are finished by now."""
    return sum(not sample.finished for group in groups for sample in group.samples)


async def _num_arrived(engines: EngineGroup) -> int:
    count = (await engines.load()).num_arrived
    if count is None:
        raise EngineError("cannot align the start of a wave: the engine does not count arriving requests; use the embedded engine")
    return count
