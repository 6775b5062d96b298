"""Tests of the limit on samples in generation and of refills in groups."""

import asyncio

import pytest

from fuligo.rollout.sampler import Turns


class Crowd:
    """Samples that take a turn each and keep it until told."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.inside: list[int] = []
        self.most = 0
        self._leave: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def enter(self, *numbers: int) -> None:
        for number in numbers:
            self._leave[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._stay(number))
        await asyncio.sleep(0.001)

    async def leave(self, *numbers: int) -> None:
        for number in numbers:
            self._leave[number].set()
        await asyncio.sleep(0.001)

    async def _stay(self, number: int) -> None:
        async with self.turns:
            self.inside.append(number)
            self.most = max(self.most, len(self.inside))
            await self._leave[number].wait()
            self.inside.remove(number)


async def test_waiting_samples_are_admitted_together_once_a_share_of_the_turns_is_free():
    crowd = Crowd(Turns(64))
    await crowd.enter(*range(80))
    assert crowd.inside == [*range(64)]
    await crowd.leave(0, 1, 2)
    assert len(crowd.inside) == 61, "three free turns of 64 interrupt nobody"
    await crowd.leave(3)
    assert crowd.inside[-4:] == [64, 65, 66, 67], "first come, first served"
    await crowd.leave(*range(4, 80))
    await asyncio.gather(*crowd.tasks.values())
    assert crowd.most == 64


async def test_the_last_waiting_samples_do_not_wait_for_a_whole_group():
    crowd = Crowd(Turns(64))
    await crowd.enter(*range(66))
    await crowd.leave(0, 1)
    assert crowd.inside[-2:] == [64, 65]


async def test_a_small_limit_admits_one_by_one():
    crowd = Crowd(Turns(2))
    await crowd.enter(0, 1, 2)
    await crowd.leave(1)
    assert crowd.inside == [0, 2]


@pytest.mark.parametrize("cancelled", [2, 3])
async def test_a_cancelled_sample_gives_its_turn_to_the_next(cancelled: int):
    crowd = Crowd(Turns(2))
    await crowd.enter(0, 1, 2, 3)
    crowd.tasks[cancelled].cancel()
    await crowd.leave(0, 1)
    assert crowd.inside == [5 - cancelled]


async def test_a_sample_that_is_cancelled_as_it_gets_its_turn_loses_no_turn():
    crowd = Crowd(Turns(1))
    await crowd.enter(0, 1, 2)
    crowd._leave[0].set()
    await asyncio.sleep(0)
    crowd.tasks[1].cancel()
    await asyncio.sleep(0.001)
    assert crowd.inside == [2]
