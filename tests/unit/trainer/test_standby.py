"""Standby ranks as real processes, which are used before they have finished importing."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.commands import SharedCommand
from fuligo.trainer.ranks.connected import ConnectedRank
from fuligo.trainer.ranks.handle import PING
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.standby import StandbyRanks
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from tests.e2e.processes import alive, descendants

SETTINGS = TorchTrainerSettings(
    hf_checkpoint=Path("model"),
    initial_weights=Path("model"),
    optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
    capacity=Capacity(max_tokens=64),
    num_ranks=2,
)


@asynccontextmanager
async def standbys(num_restarts: int) -> AsyncIterator[StandbyRanks]:
    ranks = StandbyRanks(num_restarts)
    try:
        yield ranks
    finally:
        await ranks.close()


def processes() -> dict[int, str]:
    return {pid: command for pid, command in descendants(os.getpid()).items() if "rank_process" in command}


async def close(ranks: list[ConnectedRank]) -> None:
    for rank in ranks:
        await rank.close(failed=True)


async def test_a_trainer_takes_the_processes_that_wait() -> None:
    async with standbys(num_restarts=1) as ranks:
        lost = ranks.take(2)
        ranks.prepare(SETTINGS)
        waiting = processes().keys() - {rank.pid for rank in lost}
        await close(lost)
        taken = ranks.take(2)
        assert {rank.pid for rank in taken} == waiting and [rank.rank for rank in taken] == [0, 1]
        for rank in taken:
            assert (await rank.run(SharedCommand(PING))).error is None
        await close(taken)
    assert not processes()


async def test_a_standby_that_has_ended_is_replaced() -> None:
    async with standbys(num_restarts=1) as ranks:
        ranks.prepare(SETTINGS)
        first, second = processes()
        os.kill(first, signal.SIGKILL)
        with suppress(ChildProcessError):  # the thread that receives its answers may have collected it
            await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
        taken = ranks.take(2)
        pids = [rank.pid for rank in taken]
        assert first not in pids and second in pids
        await close(taken)


async def test_standbys_that_nobody_takes_end_with_the_run() -> None:
    async with standbys(num_restarts=3) as ranks:
        ranks.prepare(SETTINGS)
        family = processes()
        assert len(family) == 2
    assert not alive(family)


async def test_none_wait_for_a_trainer_that_may_not_follow() -> None:
    async with standbys(num_restarts=1) as ranks:
        await close(ranks.take(1))
        await close(ranks.take(1))
        ranks.prepare(SETTINGS)
        assert not processes()
