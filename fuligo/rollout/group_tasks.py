"""Groups being sampled and rewarded at the same time, and a way to stop them that loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from types import TracebackType

from fuligo.engines.generation import SamplingParams
from fuligo.rollout.protocol import EngineControl, RewardFn
from fuligo.rollout.sampler import Sampler, clear_response, failed, malformation
from fuligo.types import Sample, SampleGroup

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.1
"""A request that was on its way when the engines aborted is caught by the next call."""
ABORT_DEADLINE_S = 60.0
"""What has not returned by then is cancelled and goes on later from the tokens it had before this rollout."""


class GroupTasks:
    """Async context manager: on leaving it no coroutine of it runs any more, whatever happened inside.

    Args:
        goes_on: where given, samples that an engine interrupts are continued at once, as long as it says so of their group; a group
            whose samples do not go on is returned unfinished by `next_finished`
    """

    def __init__(
        self,
        sampler: Sampler,
        reward: RewardFn,
        engines: EngineControl,
        params: SamplingParams,
        *,
        goes_on: Callable[[SampleGroup], bool] | None = None,
    ) -> None:
        self._sampler = sampler
        self._reward = reward
        self._engines = engines
        self._params = params
        self._goes_on = goes_on
        self._standing: dict[int, list[list[Sample]]] = {}
        """By group index, where `goes_on` is given: its samples as they stood when their last request was sent, or came to its end."""
        self._running: dict[asyncio.Task[None], SampleGroup] = {}
        self._done: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    async def __aenter__(self) -> GroupTasks:
        self._sampler.open = True
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
        """The smallest index of the groups that `next_finished` did not return yet."""
        return min((group.index for group in self._running.values()), default=None)

    def standing(self) -> list[SampleGroup]:
        """Copies, to be continued elsewhere, of the groups that `next_finished` did not return yet, ordered by index.

        A sample that is being generated stands as it was when its request was sent: nobody knows what a function of the user's does
        with it meanwhile.
        """
        groups = sorted(self._running.values(), key=lambda group: group.index)
        return [SampleGroup(group.index, group.row, _flat(self._standing[group.index])) for group in groups]

    def start(self, group: SampleGroup) -> None:
        if self._goes_on is not None:
            self._standing[group.index] = [[frozen(sample)] for sample in group.samples]
        task = asyncio.create_task(self._run(group), name=f"group {group.index}")
        task.add_done_callback(self._done.put_nowait)
        self._running[task] = group

    async def next_finished(self) -> SampleGroup:
        """The next group that is done: generated and, where all its samples finished, rewarded. The deadlines of both bound the wait."""
        task = await self._done.get()
        group = self._running.pop(task)
        self._standing.pop(group.index, None)
        task.result()
        return group

    async def stop(self) -> list[SampleGroup]:
        """Abort what is still being generated, cancel what is being rewarded; the groups that `next_finished` did not return."""
        self._sampler.open = False
        for task, group in self._running.items():
            if group.finished:
                task.cancel()
        groups = list(self._running.values())
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                while any(not task.done() for task in self._running):
                    await self._engines.abort_all()
                    await asyncio.wait(self._running, timeout=ABORT_AGAIN_S)
        except TimeoutError:
            waiting = sum(not task.done() for task in self._running)
            logger.warning("%d groups did not return within %g s of the abort; cancelled", waiting, ABORT_DEADLINE_S)
        await self._cancel()
        return groups

    async def _run(self, group: SampleGroup) -> None:
        parts = [[sample] for sample in group.samples]
        try:
            await asyncio.gather(*(self._continue(group, position, part) for position, part in enumerate(parts)))
        finally:
            group.samples = _flat(parts)
        if group.finished and self._sampler.open:
            await self._judge(group)

    async def _continue(self, group: SampleGroup, position: int, part: list[Sample]) -> None:
        """Replace an unfinished sample by what it becomes."""
        if part[0].finished:
            return
        if self._goes_on is None:
            part[:] = await self._sampler.sample(part[0], self._params)
            return
        group_goes_on = self._goes_on

        def goes_on(samples: Sequence[Sample]) -> bool:
            self._standing[group.index][position] = [frozen(sample) for sample in samples]
            return group_goes_on(group)

        part[:] = await self._sampler.sample_on(part[0], self._params, goes_on)
        self._standing[group.index][position] = [frozen(sample) for sample in part]

    async def _judge(self, group: SampleGroup) -> None:
        try:
            await self._reward(group)
        except Exception as error:
            logger.warning("group %d: the reward raised", group.index, exc_info=True)
            for sample in group.samples:
                failed(sample, f"the reward raised {type(error).__name__}: {error}")

    async def _cancel(self) -> None:
        """Cancel all tasks and wait until they are gone."""
        tasks = dict(self._running)
        self._running.clear()
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        self._standing.clear()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        for sample in (sample for group in tasks.values() for sample in group.samples):
            if not sample.finished and malformation(sample) is not None:
                clear_response(sample)


def frozen(sample: Sample) -> Sample:
    """A copy that stays as it is while the sample goes on: generation replaces its arrays, only the mask may be written into."""
    return replace(sample, metadata=deepcopy(sample.metadata), loss_mask=sample.loss_mask.copy(), spans=list(sample.spans))


def _flat(parts: list[list[Sample]]) -> list[Sample]:
    return [sample for part in parts for sample in part]
