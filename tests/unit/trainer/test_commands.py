"""Commands reach ranks in this process and in others, each once, and leave no references behind."""

import asyncio
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from fuligo.errors import CheckpointError, TrainerError
from fuligo.trainer.ranks.commands import Command, SharedCommand, call, call_rank
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.connected import ConnectedRank, serve
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.handle import END_SAVE, LEAVE, PING, InProcessRank, RankLostError
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.worker import RankWorker


class Held:
    """Object whose deletion can be observed."""


@dataclass
class Worker:
    """Worker that remembers what it scored without keeping it."""

    seen: list[weakref.ref[Held]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def score(self, share: Held) -> str:
        self.seen.append(weakref.ref(share))
        return "scores"

    def fail(self, error: Exception) -> None:
        raise error

    def offload(self) -> None:
        assert self.released.wait(60)

    def begin_save(self, directory: Path) -> Any:
        return ComputeThread("writer").submit(lambda: self.released.wait(60))

    def close(self) -> None:
        pass


def executor_of(rank: int, worker: Worker) -> RankExecutor:
    there = Rank(rank, 2)
    there._worker = worker
    return RankExecutor(there)


def soon(condition: Callable[[], bool]) -> bool:
    """Return whether the condition becomes true in time: other threads work towards it."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


class Served:
    """Connected rank whose other end is a thread of this process."""

    def __init__(self, rank: int = 0) -> None:
        ours, theirs = Pipe()
        self.worker = Worker()
        self.handle = ConnectedRank(rank, "here", ours)
        self.serving = threading.Thread(target=serve, args=(theirs, executor_of(rank, self.worker)), daemon=True)
        self.serving.start()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.worker.released.set()
    asyncio.run(served.handle.close(failed=False))
    served.serving.join(60)
    assert not served.serving.is_alive()


def of(command: Command[Any]) -> SharedCommand[Any]:
    return SharedCommand(command)


@pytest.mark.parametrize(("rank", "result"), [(0, "scores"), (1, None)])
async def test_the_result_comes_only_from_rank_0(rank: int, result: str | None) -> None:
    served = Served(rank)
    assert (await served.handle.run(of(call(RankWorker.score, Held())))).value == result
    await served.handle.close(failed=False)


async def test_a_rank_answers_pings_and_ends_a_save_while_it_computes(served: Served) -> None:
    await served.handle.run(of(call_rank(Rank.begin_save, Path("checkpoint"))))
    computing = asyncio.create_task(served.handle.run(of(call(RankWorker.offload))))
    saving = asyncio.create_task(served.handle.run(of(END_SAVE)))
    assert (await served.handle.run(of(PING))).error is None
    assert not computing.done() and not saving.done()
    served.worker.released.set()
    assert (await saving).error is None
    assert (await computing).error is None


def fail(error: Exception) -> SharedCommand[Any]:
    return SharedCommand(Command("fail", (error,)))


async def test_errors_of_another_process_keep_their_type_if_they_are_for_the_user(served: Served) -> None:
    refused = (await served.handle.run(fail(CheckpointError("incomplete")))).error
    unexpected = (await served.handle.run(fail(IndexError("7")))).error
    assert type(refused) is CheckpointError and str(refused) == "incomplete"
    assert isinstance(unexpected, TrainerError) and str(unexpected) == "IndexError: 7"


async def test_an_error_of_this_process_is_the_same_object() -> None:
    error = IndexError("7")
    handle = InProcessRank(executor_of(0, Worker()), "here")
    assert (await handle.run(fail(error))).error is error
    await handle.close(failed=True)


async def test_a_command_is_encoded_once_for_all_ranks_of_a_transport(served: Served) -> None:
    num_encodings = 0

    class Counted:
        def __reduce__(self) -> Any:
            nonlocal num_encodings
            num_encodings += 1
            return Held, ()

    command = of(Command("score", (Counted(),)))
    await asyncio.gather(*(served.handle.run(command) for _ in range(4)))
    assert num_encodings == 1
    assert pickle.loads(command.encoded(pickle.dumps)).name == "score"


async def test_a_rank_that_ends_fails_its_running_and_its_next_commands() -> None:
    ours, theirs = Pipe()
    handle = ConnectedRank(1, "here", ours)
    running = asyncio.create_task(handle.run(of(PING)))
    await asyncio.sleep(0.05)
    theirs.close()
    with pytest.raises(RankLostError, match="closed its connection"):
        await running
    with pytest.raises(RankLostError, match="closed its connection"):
        await handle.run(of(PING))


def test_compute_thread_keeps_no_reference_to_finished_work() -> None:
    compute, held = ComputeThread("test"), Held()
    gone = weakref.ref(held)
    compute.submit(lambda held=held: held).result()
    del held
    assert soon(lambda: gone() is None)
    compute.stop()


async def test_a_waiting_rank_keeps_no_reference_to_the_last_command(served: Served) -> None:
    await served.handle.run(of(call(RankWorker.score, Held())))
    (gone,) = served.worker.seen
    assert soon(lambda: gone() is None)


def test_leave_can_be_sent_to_a_rank_that_was_never_loaded() -> None:
    executor = RankExecutor(Rank(0, 1))
    assert executor.answer(lambda: LEAVE, is_queued=True).result(10).error is None
    assert executor.rank.has_left
