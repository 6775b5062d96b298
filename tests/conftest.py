"""Settings and fixtures of all tests."""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Several processes share the cores of the machine, and OpenMP's threads spin while they wait for one another. torch reads this on import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until all modules are imported

import pytest
from _pytest.logging import catching_logs
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from fuligo.limits import freeze_garbage_collector
from tests.e2e.command import warm_start
from tests.e2e.warm_children import ForkServer, same_for_imports
from tests.small_disk import SmallDisk, mounted

# No deadlines for examples: a busy machine may be slow at any moment. Every run of `make test` draws the same examples, so that a
# change is judged by what it changed; `make test-full` draws new ones.
settings.register_profile("fuligo", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "full",
    settings.get_profile("fuligo"),
    max_examples=300,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
settings.load_profile("fuligo")


def attach_to_root(self: catching_logs[Any]) -> logging.Handler:
    """Catch what reaches the root logger.

    pytest also attaches its handlers, six times per test, to every logger that does not propagate. There are ninety, most of them
    PyTorch's, and no test reads them.
    """
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


catching_logs.__enter__ = attach_to_root


def pytest_collection_finish() -> None:
    """Leave all modules out of garbage collections: with torch, transformers and Ray, a full one takes a tenth of a second."""
    freeze_garbage_collector()
    gc.enable()  # last, since the first allocation afterwards starts a collection of all that is not frozen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Let no test change what later tests may fork."""
    with same_for_imports():
        return (yield)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mount a file system of 4 MiB."""
    with mounted(tmp_path / "disk", 4 * 1024**2) as disk:
        yield disk


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Start a process from which embedded engines and ranks fork, each of which would import torch and transformers for 5 s of CPU time."""
    server = warm_start().fork_server(os.environ)  # the path and the threads of tokenizers differ
    yield server
    server.close()


@pytest.fixture
def warm_children(fork_server: ForkServer) -> Iterator[None]:
    """Let the engines and ranks that a test starts fork from the fork server."""
    with fork_server.serving():
        yield
