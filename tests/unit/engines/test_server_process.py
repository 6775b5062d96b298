"""No server process outlives the process that started it, however that one ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuligo.config.passthrough import command_line
from fuligo.config.secret import Environment, Secret
from fuligo.engines.guard import _descendants
from fuligo.engines.server_process import ServerProcess, secrets_of
from fuligo.errors import EngineError

SERVER = """
import os, signal, subprocess, sys, time
note = open(sys.argv[1], "w")
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", stubborn])
deserter = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
print(os.getpid(), worker.pid, deserter.pid, file=note, flush=True)
{then}
"""
"""A server with a worker that ignores SIGTERM and another that left its process group."""

STARTER = """
import asyncio, sys, time
from pathlib import Path
from fuligo.config.secret import Environment, Secret
from fuligo.engines.server_process import ServerProcess, secrets_of
process = ServerProcess("engine 0", [sys.executable, "-c", sys.argv[1], sys.argv[2]], log_file=Path(sys.argv[3]), grace_s=1)
time.sleep(600)
"""


def server_pids(note: Path) -> list[int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if note.exists() and (text := note.read_text()).endswith("\n"):
            return [int(pid) for pid in text.split()]
        time.sleep(0.02)
    raise AssertionError("the server did not start")


def wait_for_output(log: Path) -> None:
    deadline = time.monotonic() + 120
    while not log.read_text():
        assert time.monotonic() < deadline, "the server says nothing"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {[pid for pid in pids if alive(pid)]}")


def start(tmp_path: Path, then: str) -> tuple[ServerProcess, list[int]]:
    note = tmp_path / "pids"
    process = ServerProcess(
        "engine 0", [sys.executable, "-c", SERVER.format(then=then), str(note)], log_file=tmp_path / "engine.txt", grace_s=1
    )
    return process, [process.pid, *server_pids(note)]


@pytest.mark.long
async def test_stop_ends_stubborn_workers_and_those_that_left_the_group(tmp_path: Path) -> None:
    process, pids = start(tmp_path, "time.sleep(600)")
    await process.stop()
    assert_all_end(pids)


@pytest.mark.long
def test_a_killed_starter_takes_its_servers_along(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, SERVER.format(then="time.sleep(600)"), str(note), str(tmp_path / "engine.txt")]
    )
    pids = server_pids(note)
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    assert_all_end(pids)


async def test_a_killed_guard_takes_its_server_along_and_stop_ends_what_is_left(tmp_path: Path) -> None:
    """The kernel kills the server at once; `stop`, which precedes every restart, kills the workers that nobody watches any more."""
    process, pids = start(tmp_path, "time.sleep(600)")
    os.kill(process.pid, signal.SIGKILL)
    _, server, *workers = pids
    assert_all_end([server])
    assert all(alive(pid) for pid in workers)
    await process.ended()
    await process.stop()
    assert not any(alive(pid) for pid in workers)


def test_a_killed_starter_and_guard_leave_no_server(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    server = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, server, str(note), str(tmp_path / "engine.txt")])
    [pid] = server_pids(note)
    guard = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(starter.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    assert_all_end([pid])


def test_the_command_never_starts_when_the_guard_ends_before_it() -> None:
    """The signal of prctl is for parents that end later."""
    ended = subprocess.run(
        [sys.executable, "-c", "import os; from fuligo.engines.guard import _end_with; _end_with(os.getppid() + 1); print('started')"],
        capture_output=True,
        check=False,
        timeout=240,
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


async def test_stop_names_processes_that_cannot_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, pids = start(tmp_path, "time.sleep(600)")
    os.kill(process.pid, signal.SIGKILL)
    await process.ended()
    with monkeypatch.context() as patch:
        patch.setattr("fuligo.engines.server_process.os.kill", lambda *_: None)  # as if they hung in a driver
        patch.setattr("fuligo.engines.server_process.ORPHANS_TIMEOUT_S", 0.2)
        with pytest.raises(
            EngineError, match=r"cannot free the memory of engine 0: some of its processes \(\d+, \d+\) did not end within 0\.2 s"
        ):
            await process.stop()
    await process.stop()
    assert_all_end(pids)


@pytest.mark.long
async def test_workers_end_with_a_server_that_crashes_and_the_log_says_why(tmp_path: Path) -> None:
    process, pids = start(tmp_path, "print('out of pages', flush=True); os._exit(3)")

    async def never() -> bool:
        return False

    with pytest.raises(EngineError, match=r"engine 0 ended with exit code 3; its log \(.*engine.txt\) ends:\nout of pages"):
        await process.wait_until(never, timeout_s=60)
    assert_all_end(pids)


SHARING = """
import multiprocessing, os, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import torch, torch.multiprocessing
torch.multiprocessing.set_sharing_strategy("file_system")
tensor = torch.zeros(1000).share_memory_()
lock = multiprocessing.get_context("spawn").Lock()
queue = SharedMemory(f"sgl_shm_mq_{os.getpid()}_0", create=True, size=4096)
print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""
"""A process that shares a tensor, a lock and a queue as SGLang's ranks do, and is killed together with the processes that would remove
their files.
"""


def tensors_of(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"torch_{pid}_*"))


def locks_of(pid: int) -> list[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    inodes = [int(line.split()[4]) for line in lines if "/dev/shm/sem." in line]
    return [file for file in Path("/dev/shm").glob("sem.mp-*") if file.stat().st_ino in inodes]


@pytest.mark.long
def test_what_forced_processes_share_goes_with_them(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    process = ServerProcess("engine 0", [sys.executable, "-c", SHARING, str(note)], log_file=tmp_path / "engine.txt", grace_s=1)
    [pid] = server_pids(note)
    locks = locks_of(pid)
    queue = Path(f"/dev/shm/sgl_shm_mq_{pid}_0")
    assert tensors_of(pid)
    assert locks
    assert queue.exists()
    other = Path(f"/dev/shm/torch_{pid}1_1_0")  # of a process that has nothing to do with it
    other.touch()
    planted = Path(f"/dev/shm/torch_{pid}_0_planted")  # another user may use any name
    planted.mkdir()
    try:
        asyncio.run(process.stop())
        assert tensors_of(pid) == [planted]
        assert not any(lock.exists() for lock in locks)
        assert not queue.exists()
        assert other.exists()
    finally:
        other.unlink()
        planted.rmdir()


async def test_the_error_says_that_a_server_was_killed(tmp_path: Path) -> None:
    process = ServerProcess("engine 1", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log_file=tmp_path / "engine.txt")
    await process.ended()
    with pytest.raises(EngineError, match=r"engine 1 was killed \(out of memory, or by itself after an error\)"):
        process.check_alive()


async def test_the_deadline_names_the_server_and_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('loading shard 1', flush=True); time.sleep(600)"]
    log = tmp_path / "router.txt"
    process = ServerProcess("router", command, log_file=log, grace_s=1)
    wait_for_output(log)

    async def ready() -> bool:
        return False

    with pytest.raises(EngineError, match=r"router was not ready within 0\.2 s; its log .* ends:\nloading shard 1"):
        await process.wait_until(ready, timeout_s=0.2)
    await process.stop()


async def test_a_log_shows_no_secret(tmp_path: Path) -> None:
    """SGLang logs all its arguments; the guard hides the secret ones, also in the last output of the server, on either stream."""
    log = tmp_path / "log.txt"
    said = "import os, sys; print(sys.argv[1:], os.environ['TOKEN'], 'FULIGO_GUARD_HIDES' in os.environ); sys.exit('last: ' + sys.argv[1])"
    arguments, environment = {"api_key": Secret("KEY", "canary-1"), "port": 80}, Environment({"TOKEN": "canary-22"})
    process = ServerProcess(
        "engine 0",
        [sys.executable, "-c", said, *command_line("sglang", arguments)[1:]],
        log_file=log,
        environment=environment.reveal(),
        grace_s=5,
        secrets=secrets_of(arguments, environment),
    )
    await process.ended()
    assert sorted(log.read_text().splitlines()) == ["['***', '--port', '80'] *** False", "last: ***"]


def test_the_guard_looks_at_processes_while_they_end():
    """The listing must not fail on a process that ends at that moment, since the server ends with its guard."""
    churning = subprocess.Popen(["bash", "-c", "while :; do (exit 0) & done"], stderr=subprocess.DEVNULL)
    try:
        assert all(churning.pid in list(_descendants(os.getpid())) for _ in range(600))
    finally:
        churning.kill()
        churning.wait()


async def test_a_server_starts_whatever_its_environment_imports(tmp_path: Path) -> None:
    """The variables of an engine are those of its environment, which need not have fuligo, and may hide modules."""
    for module in ("fuligo.py", "json.py"):
        (tmp_path / module).write_text("raise ImportError('of the engine')")
    command = [sys.executable, "-I", "-c", "import json; print('started')"]
    process = ServerProcess("engine 0", command, log_file=tmp_path / "log.txt", environment={"PYTHONPATH": str(tmp_path)})
    await process.ended()
    assert (tmp_path / "log.txt").read_text() == "started\n"
