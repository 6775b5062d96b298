"""Stand-ins end as what the tests start for them, pass SIGTERM on, and lead to it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm_worker
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.stand_ins import ADDRESS, REQUEST, Broker

StandIn = Callable[[str], subprocess.Popen[str]]
UNKNOWN = "unknown"
"""Command that the tests do not start."""
WAITS = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"


class Shells:
    """Shells in place of guards."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def suits(self, command: str, _: object) -> bool:
        return command != UNKNOWN

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        stdin, stdout, stderr = descriptors
        self.started.append(subprocess.Popen(["sh", "-c", request["command"]], stdin=stdin, stdout=stdout, stderr=stderr))
        return self.started[-1].pid


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    """Start a stand-in for a shell with a command."""
    address, running = tmp_path / "socket", []
    Broker(Shells(), address)

    def start(command: str) -> subprocess.Popen[str]:
        variables = {**os.environ, ADDRESS: str(address), REQUEST: json.dumps({"command": command, "environment": {}})}
        python = [sys.executable, "-m", "tests.e2e.stand_ins"]
        running.append(subprocess.Popen(python, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", -signal.SIGKILL)])
def test_it_ends_alike(stand_in: StandIn, command: str, code: int) -> None:
    assert stand_in(command).wait(60) == code


def test_it_fails_if_nothing_is_started_for_it(stand_in: StandIn) -> None:
    assert stand_in(UNKNOWN).wait(60) == 1


def test_it_passes_sigterm_on_and_leads_to_the_process(stand_in: StandIn) -> None:
    process = stand_in(WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    wait_until(lambda: f"sh -c {WAITS} " in descendants(process.pid).values(), "the stand-in leads to the shell", 60)
    process.terminate()
    assert process.wait(60) == 5


def test_what_it_stands_for_ends_when_it_is_killed(stand_in: StandIn) -> None:
    process = stand_in(WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    wait_until(lambda: descendants(process.pid), "the stand-in leads to the shell", 60)
    shell = descendants(process.pid)
    process.kill()
    wait_until(lambda: not alive(shell), "the shell has ended", 60)


class Refusing(Shells):
    def suits(self, *_: object) -> bool:
        return False


def test_a_worker_that_may_not_fork_starts_fresh(tmp_path: Path) -> None:
    Broker(Refusing(), tmp_path / "socket")
    script = tmp_path / "worker.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    environment = {**os.environ, warm_worker.ADDRESS: str(tmp_path / "socket")}
    done = subprocess.run(
        [sys.executable, "-m", warm_worker.MODULE, script, "--option"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "__main__ ['--option']\n"
