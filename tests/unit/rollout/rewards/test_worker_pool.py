"""Reward workers that hang, die or are canceled do not affect the pool."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fuligo.errors import RewardError
from fuligo.rollout.rewards.worker_pool import NoVerdictError, Worker, WorkerPool

HANGS = "9^{9^{9^{9}}}"


def worker_pids(pool: WorkerPool) -> list[int]:
    return [worker._process.pid for worker in (*pool._idle, *pool._busy)]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("condition not met within a minute")


async def until_busy(pool: WorkerPool) -> int:
    """Wait for a busy process and return its pid."""
    await until(lambda: bool(pool._busy))
    return worker_pids(pool)[-1]


@pytest.mark.long
async def test_a_comparison_that_hangs_is_ended_and_its_worker_replaced() -> None:
    pool = WorkerPool("symbolic_judge.py", num_workers=1, timeout_s=60.0)
    try:
        assert await pool.ask(answer="\\frac12", golds=["0.5"])
        first = worker_pids(pool)
        pool._timeout_s = 1.0
        with pytest.raises(RewardError, match="no verdict within 1 s"):
            await pool.ask(answer=HANGS, golds=["5"])
        assert worker_pids(pool) == []
        pool._timeout_s = 60.0
        assert await pool.ask(answer="x+1", golds=["1+x"])
        assert worker_pids(pool) != first
    finally:
        await pool.close()


@pytest.mark.long
async def test_a_worker_killed_at_work_is_replaced_once() -> None:
    """The request is repeated on a new process; if that one is killed too, there is no verdict."""
    pool = WorkerPool("symbolic_judge.py", num_workers=1, timeout_s=30.0)
    try:
        question = asyncio.create_task(pool.ask(answer=HANGS, golds=["5"]))
        killed: list[int] = []
        for _ in range(2):
            pid = await until_busy(pool)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            await until(lambda: killed[-1] not in worker_pids(pool))
        with pytest.raises(RewardError, match="two reward workers died"):
            await question
        assert len(set(killed)) == 2
    finally:
        await pool.close()


async def test_a_judge_that_runs_out_of_memory_has_no_verdict_and_one_that_raises_fails(tmp_path: Path) -> None:
    """The first is a wrong answer, the second no answer's fault."""
    judge = tmp_path / "judge.py"
    judge.write_text("def prepare(): pass\n\ndef judge(num_bytes): return bool(bytearray(num_bytes))\n")
    worker = await Worker.start(judge)
    try:
        with pytest.raises(NoVerdictError, match="MemoryError"):
            await worker.ask({"num_bytes": 1 << 40}, timeout_s=30.0)
        with pytest.raises(RewardError, match="TypeError") as raised:
            await worker.ask({"num_bytes": [[]]}, timeout_s=30.0)
        assert not isinstance(raised.value, NoVerdictError)
    finally:
        await worker.kill()


async def test_imports_may_map_more_memory_than_judging_may_take(tmp_path: Path) -> None:
    """Libraries for GPUs map tens of gigabytes of address space."""
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import mmap\n\n"
        "def prepare():\n    global mapped\n    mapped = mmap.mmap(-1, 6 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n\n"
        "def judge(num_bytes): return bool(bytearray(num_bytes))\n"
    )
    worker = await Worker.start(judge)
    try:
        assert await worker.ask({"num_bytes": 1 << 20}, timeout_s=30.0)
        with pytest.raises(NoVerdictError, match="MemoryError"):
            await worker.ask({"num_bytes": 5 << 30}, timeout_s=30.0)
    finally:
        await worker.kill()


@pytest.mark.parametrize(
    ("prepare", "cause"),
    [("raise ImportError('no module')", "cannot import its judge: no module"), ("import os; os._exit(3)", "ended with exit code 3")],
)
async def test_if_no_worker_can_start_all_requests_fail_at_once(tmp_path: Path, prepare: str, cause: str) -> None:
    judge, starts = tmp_path / "judge.py", tmp_path / "starts"
    judge.write_text(f"def prepare():\n    open({str(starts)!r}, 'a').write('x')\n    {prepare}\n")
    pool = WorkerPool("symbolic_judge.py", num_workers=2, timeout_s=30.0)
    pool._judge = judge
    for _ in range(5):
        with pytest.raises(RewardError, match=cause):
            await pool.ask(answer="1")
    assert starts.read_text() == "x"


async def test_a_worker_killed_while_idle_is_replaced() -> None:
    pool = WorkerPool("symbolic_judge.py", num_workers=1, timeout_s=30.0)
    try:
        assert await pool.ask(answer="\\frac12", golds=["0.5"])
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert await pool.ask(answer="\\frac13", golds=["1/3"])
    finally:
        await pool.close()


async def test_a_cancelled_request_leaves_no_reply_for_the_next_one() -> None:
    pool = WorkerPool("symbolic_judge.py", num_workers=1, timeout_s=30.0)
    try:
        question = asyncio.create_task(pool.ask(answer=HANGS, golds=["5"]))
        await until_busy(pool)
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        assert await pool.ask(answer="\\frac12", golds=["0.5"])
    finally:
        await pool.close()


async def test_processes_start_when_needed_and_end_with_the_pool() -> None:
    pool = WorkerPool("symbolic_judge.py", num_workers=2, timeout_s=30.0)
    assert worker_pids(pool) == []
    verdicts = await asyncio.gather(*(pool.ask(answer=f"\\frac{{{n}}}{{2}}", golds=["0.5"]) for n in range(6)))
    assert verdicts == [n == 1 for n in range(6)]
    pids = worker_pids(pool)
    assert len(pids) == 2
    await pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.long
async def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """An idle worker ends at once, because its input ends; a busy one ends by its own alarm at the deadline."""
    judge = tmp_path / "judge.py"
    judge.write_text("import time\n\ndef prepare(): pass\n\ndef judge(seconds): time.sleep(seconds)\n")
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_PARENT, judge, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(120):
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    await parent.wait()
    await until(lambda: not any(is_running(pid) for pid in pids))


KILLED_PARENT = """
import asyncio, sys
from pathlib import Path
from fuligo.rollout.rewards.worker_pool import WorkerPool

async def main():
    pool = WorkerPool("symbolic_judge.py", num_workers=2, timeout_s=60.0)
    pool._judge = Path(sys.argv[1])
    await asyncio.gather(*(pool.ask(seconds=0.01) for _ in range(2)))
    pool._timeout_s = 2.0
    hanging = asyncio.create_task(pool.ask(seconds=3600))
    while not pool._busy:
        await asyncio.sleep(0.01)
    print(*(worker._process.pid for worker in (*pool._idle, *pool._busy)), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


ODD_ANSWERS = ["\\boxed{}}{", "\ud800", "\x00", "🦠" * 1000, "\\" * 999, "(" * 200, "1e999999999", "\\int_0^1", "{" * 50, "%"]


@pytest.mark.long
async def test_odd_answers_are_wrong_or_fail_and_nothing_else() -> None:
    pool = WorkerPool("symbolic_judge.py", num_workers=1, timeout_s=10.0)
    try:
        for answer in ODD_ANSWERS:
            with suppress(RewardError):
                assert not await pool.ask(answer=answer, golds=["5"]), answer
            assert await pool.ask(answer="\\frac12", golds=["0.5"]), answer
    finally:
        await pool.close()
