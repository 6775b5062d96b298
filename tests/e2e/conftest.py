"""Fixtures for whole runs: the command, a tiny checkpoint, a prompt file."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.command import environment, train_command, warm_start
from tests.e2e.processes import interrupt
from tests.e2e.warm_children import ForkServer

NUM_PROMPTS = 40
Job = Callable[..., list[str]]
"""`train_command` with the tiny checkpoint and the prompt file."""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl")


def save_prompts(path: Path) -> Path:
    """Write 40 different prompts in the format of dapo-math; return the file."""
    rows = [{"prompt": [{"role": "user", "content": f"what is {n} + {n}?"}], "label": str(2 * n)} for n in range(10, 10 + NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def job(checkpoint: Path, prompts: Path) -> Job:
    return partial(train_command, checkpoint, prompts)


@pytest.fixture(scope="session")
def warm_commands() -> Iterator[ForkServer]:
    """Start a process from which commands fork as children of the tests, and from which their engines and ranks do."""
    server = warm_start().fork_server()
    yield server
    server.close()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start the command as in a terminal of its own, or in the background; kill what is left of it when the test ends.

    A `warm` one forks, and so do its engine and its ranks, from a process that has imported what they import.
    """
    running: list[subprocess.Popen[str]] = []

    def launch(*arguments: object, in_background: bool = False, warm: bool = False, **extra_environment: str) -> subprocess.Popen[str]:
        forks = request.getfixturevalue("warm_commands").serving() if warm else nullcontext()
        with interrupt(ignored=in_background), forks:
            process = subprocess.Popen(
                [sys.executable, "-m", "fuligo", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(**extra_environment),
                start_new_session=True,
            )
        running.append(process)
        return process

    yield launch
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
