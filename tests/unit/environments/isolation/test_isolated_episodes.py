"""Environments in processes of their own: a process that blocks, crashes or exits fails its sample, and no other."""

import asyncio
import contextlib
import errno
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from fuligo.environments import AssistantTurn, Row
from fuligo.environments.environment import Environment
from fuligo.environments.isolation import workers
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.environments.isolation.messages import FailureError
from fuligo.environments.isolation.workers import Worker, Workers
from tests.unit.conftest import Isolate
from tests.unit.environments.isolation.drawing import Drawing
from tests.unit.environments.isolation.misbehaving import Misbehaving

FIRST, LAST = AssistantTurn("a"), AssistantTurn("a", last=True)


@pytest.fixture
def killed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a process that does not react to a cancellation after a short time."""
    monkeypatch.setattr(workers, "_CANCEL_S", 0.2)


@pytest.fixture(scope="module")
def shared() -> Iterator[IsolatedFactory]:
    """Make a factory for tests of single episodes, after which it is as before."""
    workers = Workers(f"{Misbehaving.__module__}.{Misbehaving.__name__}", {}, memory_bytes=1 << 30)
    workers.start()
    yield IsolatedFactory(Misbehaving, Misbehaving.Settings(), workers)
    workers.close()


async def play(environment: Environment) -> tuple[str, float]:
    """Play an episode; return what the environment said, and the id of its process."""
    try:
        await environment.reset()
        step = await environment.step(FIRST)
        last = await environment.step(LAST)
        assert last.metrics["leader"] == 1.0
        return step.messages[0]["content"], last.metrics["pid"]
    finally:
        await environment.close()


def environment(factory: IsolatedFactory, prompt: str = "") -> Environment:
    return factory.make(Row(prompt, "", {}, 0))


async def gone(pids: Sequence[float]) -> None:
    """Wait until processes have ended."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 60)
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in alive)


async def test_processes_that_ended_leave_their_place_to_others(isolate: Isolate) -> None:
    factory = isolate(Misbehaving)
    factory.workers._most = 1
    for prompt in ("exits", "exits in close", "crashes"):
        with pytest.raises(FailureError):
            await asyncio.wait_for(play(environment(factory, prompt)), 20)
    await asyncio.wait_for(play(environment(factory)), 20)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("exits", "its process ended with exit status 7 in step 1"),
        ("crashes", r"its process ended by signal 11 \(SIGSEGV\) in step 1"),
        ("kills itself", r"its process ended by signal 9 \(SIGKILL; memory may have run out\) in step 1"),
        ("crashes in the constructor", r"its process ended by signal 11 \(SIGSEGV\) in reset"),
        ("closes descriptors", "its process .* in step 1"),
        ("closes descriptors and blocks", "its process closed its connection in step 1"),
        ("writes garbage", "its process sent an invalid message"),
        ("announces too much", "its process sent a message of 18,446,744,073,709,551,615 bytes"),
        ("leaves its descriptors to a child and exits", "its process ended with exit status 7 in step 1"),
        ("exits in close", "its process ended with exit status 4 in close"),
        ("eats memory", "step raised MemoryError"),
        ("has no JSON state", "state raised TypeError: not JSON data"),
    ],
)
async def test_a_process_that_misbehaves_fails_its_own_episode(shared: IsolatedFactory, prompt: str, error: str) -> None:
    async def bad() -> str:
        each = environment(shared, prompt)
        with pytest.raises(FailureError, match=error) as raised:
            try:
                await each.reset()
                if prompt == "has no JSON state":
                    each.state()
                await each.step(FIRST)
            finally:
                await each.close()
        return str(raised.value)

    _, (_, good_pid) = await asyncio.gather(bad(), play(environment(shared)))
    _, other_pid = await play(environment(shared))
    assert os.getpid() not in (good_pid, other_pid)


@pytest.mark.long
@pytest.mark.usefixtures("killed_soon")
async def test_processes_that_block_are_killed_and_hold_up_nobody(isolate: Isolate) -> None:
    factory = isolate(Misbehaving)

    async def block(prompt: str) -> None:
        blocked = environment(factory, prompt)
        try:
            async with asyncio.timeout(1.0):
                await blocked.reset()
                await blocked.step(FIRST)
                await blocked.step(LAST)
                await blocked.close()
        finally:
            await blocked.close()

    prompts = ("blocks", "computes in C", "waits for a lock", "ignores signals", "blocks in reset", "blocks in close")
    blocking = asyncio.gather(*map(block, prompts), return_exceptions=True)
    for _ in range(20):
        await play(environment(factory))
    assert {prompt: type(end) for prompt, end in zip(prompts, await blocking, strict=True)} == dict.fromkeys(prompts, TimeoutError)
    assert factory.workers._spawner.process is not None
    children = psutil.Process(factory.workers._spawner.process.pid).children()
    async with asyncio.timeout(60):
        while len(children) > 1:  # the one that is reused
            await asyncio.sleep(0.02)
            children = psutil.Process(factory.workers._spawner.process.pid).children()


@pytest.mark.long
@pytest.mark.usefixtures("killed_soon")
async def test_a_process_that_is_killed_says_where_it_was(isolate: Isolate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    factory = isolate(Misbehaving)
    for prompt in ("computes in C", "blocks"):
        stuck = environment(factory, prompt)
        await stuck.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await stuck.step(FIRST)
        await stuck.close()
        await gone([stuck.state()["pid"]])
    assert factory.workers._spawner.output is not None
    output = factory.workers._spawner.output
    await factory.close()
    await asyncio.to_thread(output.join)
    places = [
        message for message in caplog.messages if re.search(r'environment:   File ".*misbehaving.py", line \d+ in misbehave', message)
    ]
    assert len(places) == 2


async def test_a_process_is_reused_if_its_episode_leaves_nothing_behind(isolate: Isolate) -> None:
    factory = isolate(Misbehaving)
    pids = [(await play(environment(factory)))[1] for _ in range(3)]
    assert len(set(pids)) == 1
    for prompt in ("leaves a task", "leaves a thread", "leaves a call in a thread"):
        _, pid = await play(environment(factory, prompt))
        await gone([pid])


@pytest.mark.parametrize("prompt", ["leaves a child", "leaves a child of a thread", "leaves a child in a session", "leaves a daemon"])
async def test_what_an_episode_started_ends_with_it(shared: IsolatedFactory, prompt: str) -> None:
    other = environment(shared, prompt)
    await other.reset()
    others_child = (await other.step(FIRST)).messages[0]["content"]
    child, pid = await play(environment(shared, prompt))
    await gone([pid, int(child)])
    assert psutil.Process(int(others_child)).name() == "sleep"
    await other.close()
    await gone([int(others_child)])


async def test_an_idle_process_that_died_is_replaced(isolate: Isolate) -> None:
    factory = isolate(Misbehaving)
    _, pid = await play(environment(factory))
    os.kill(int(pid), signal.SIGKILL)
    await gone([pid])
    _, other = await play(environment(factory))
    assert other != pid


@pytest.mark.long
async def test_the_process_that_starts_the_others_is_started_again(isolate: Isolate) -> None:
    factory = isolate(Misbehaving)
    _, pid = await play(environment(factory))
    assert factory.workers._spawner.process is not None
    factory.workers._spawner.process.kill()
    factory.workers._spawner.process.wait()
    await gone([pid])
    _, other = await play(environment(factory))
    assert other != pid


async def test_an_episode_without_a_process_waits_for_another_one(isolate: Isolate, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = isolate(Misbehaving)
    workers = factory.workers
    first = environment(factory)
    await first.reset()

    async def refused() -> Worker:
        raise FailureError("cannot start its process")

    monkeypatch.setattr(workers, "_new", refused)
    waiting = asyncio.create_task(play(environment(factory)))
    await asyncio.sleep(0)
    assert not waiting.done()
    (pid,) = [worker.pid for worker in workers._busy]
    await first.close()
    assert (await waiting)[1] == pid
    workers.discard(workers._idle.pop())
    with pytest.raises(FailureError, match="cannot start its process"):
        await play(environment(factory))


@pytest.mark.long
async def test_messages_of_any_size_pass(isolate: Isolate) -> None:
    factory = isolate(Misbehaving)
    said, _ = await play(environment(factory, "says much"))
    assert len(said) == 64 << 20
    each = factory.make(Row("", "", {"text": "y" * (32 << 20)}, 0))
    await play(each)


async def test_what_an_environment_prints_is_logged_in_part(isolate: Isolate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    factory = isolate(Misbehaving)
    await play(environment(factory, "prints"))
    await factory.close()
    assert factory.workers._spawner.output is not None
    await asyncio.to_thread(factory.workers._spawner.output.join)
    assert "environment: printed by the environment" in caplog.messages
    assert len(caplog.records) < 200
    assert max(map(len, caplog.messages)) < 1000


async def test_a_progress_bar_of_the_module_leaves_no_thread(isolate: Isolate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHEN_IMPORTED", "show progress")
    await play(environment(isolate(Misbehaving)))


async def test_half_of_the_possible_processes_are_used_if_no_more_files_can_be_opened(
    isolate: Isolate, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = isolate(Misbehaving)
    make, num_left = socket.socketpair, 4

    def scarce() -> tuple[socket.socket, socket.socket]:
        nonlocal num_left
        if num_left == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        num_left -= 1
        return make()

    monkeypatch.setattr(socket, "socketpair", scarce)
    played = await asyncio.gather(*(play(environment(factory)) for _ in range(8)))  # none is in use when the fifth asks
    assert len({pid for _, pid in played}) == 2
    assert len(factory.workers._idle) == 2
    while factory.workers._idle:
        factory.workers.discard(factory.workers._idle.pop())
    with pytest.raises(FailureError, match="cannot start its process: Too many open files; raise the limit of open files"):
        await play(environment(factory))


async def test_processes_leave_open_files_to_the_run(isolate: Isolate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (9, 9))
    factory = isolate(Misbehaving)
    played = await asyncio.gather(*(play(environment(factory)) for _ in range(9)))
    assert len({pid for _, pid in played}) == 3


async def test_processes_end_if_no_thread_can_be_started(isolate: Isolate, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = isolate(Misbehaving)
    _, pid = await play(environment(factory))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(FailureError, match="exit status 7"):
        await play(environment(factory, "exits"))
    await factory.close()
    monkeypatch.undo()
    await gone([pid])


async def test_secrets_and_gpus_are_not_handed_over(isolate: Isolate, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MY_API_KEY",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "PGPASSWORD",
        "AN_APIKEY",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    factory = isolate(Misbehaving, handed_over=("DB_PASSWORD",))
    said, _ = await play(environment(factory, "shows its variables"))
    assert set(re.findall("value of ([A-Z_]+)", said)) == {"DB_PASSWORD", "TOKENIZERS_PARALLELISM"}
    assert "'CUDA_VISIBLE_DEVICES': ''" in said
    with pytest.raises(FailureError, match="KeyError: 'MY_API_KEY'; the run withholds this variable"):
        await play(environment(factory, "wants a secret"))


@pytest.mark.long
async def test_processes_draw_different_random_numbers(isolate: Isolate) -> None:
    factory = isolate(Drawing)
    drawn = await asyncio.gather(*(play(environment(factory)) for _ in range(4)))
    for numbers in zip(*(said.split() for said, _ in drawn), strict=True):  # of numpy and of torch
        assert len(set(numbers)) == 4


RUN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in jobs of the background
import asyncio, os, subprocess, sys
from fuligo.environments import AssistantTurn, Row
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.environments.isolation.workers import Workers
from tests.unit.environments.isolation.misbehaving import Misbehaving

async def main():
    workers = Workers("tests.unit.environments.isolation.misbehaving.Misbehaving", {})
    workers.start()
    factory = IsolatedFactory(Misbehaving, Misbehaving.Settings(), workers)
    idle, blocked, parent = (factory.make(Row(prompt, "", {}, 0)) for prompt in ("", "ignores signals", "leaves a child"))
    await asyncio.gather(*(each.reset() for each in (idle, blocked, parent)))
    child = (await parent.step(AssistantTurn("a"))).messages[0]["content"]
    pids = [workers._spawner.process.pid, child, *(each.state()["pid"] for each in (idle, blocked, parent))]
    if os.fork() == 0:  # it holds the run's sockets open
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        import time
        time.sleep(20)
        os._exit(0)
    step = asyncio.create_task(blocked.step(AssistantTurn("a")))
    await asyncio.sleep(0.1)
    print(*pids, flush=True)
    await step

asyncio.run(main())
"""


@pytest.mark.long
# SIGTERM has its default action here and ends the run as SIGKILL does.
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_no_process_outlives_the_run(number: signal.Signals) -> None:
    root = str(Path(__file__).parents[4])
    run = subprocess.Popen([sys.executable, "-c", RUN], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 5 and all(map(psutil.pid_exists, pids))
    run.send_signal(number)
    run.wait()
    asyncio.run(gone(pids))


HANGING = """
import logging, sys
from fuligo.environments.isolation.workers import Workers

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
Workers("tests.unit.environments.isolation.misbehaving.Misbehaving", {}).start()
"""


@pytest.mark.long
def test_an_import_that_hangs_does_not_outlive_the_run() -> None:
    root = str(Path(__file__).parents[4])
    variables = os.environ | {"WHEN_IMPORTED": "hang"}
    run = subprocess.Popen([sys.executable, "-c", HANGING], cwd=root, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    said = run.stdout.readline().decode().split()
    assert said[:2] == ["environment:", "hangs"]
    run.kill()
    run.wait()
    run.stdout.close()
    asyncio.run(gone([float(pid) for pid in said[2:]]))
