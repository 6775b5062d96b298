"""Fixtures for whole runs on Ray on this machine."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fuligo.engines.host import PortClaims
from tests.cluster.hosts import Network, network_of, why_not
from tests.cluster.launched_run import LaunchedRun, LaunchOnHosts
from tests.e2e.conftest import checkpoint, job, prompts, start, warm_commands
from tests.e2e.warm_children import ForkServer
from tests.e2e.warm_worker import serve_workers

__all__ = ["checkpoint", "job", "prompts", "start", "warm_commands"]

pytest.importorskip("ray")


@pytest.fixture(scope="session")
def warm_workers(warm_commands: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a command whose ranks and node agents are forked from the same process as its engine."""
    return serve_workers(warm_commands.children, tmp_path_factory.mktemp("workers") / "socket")


@pytest.fixture
def free_port() -> Iterator[int]:
    """Claim a port for a Ray head."""
    with PortClaims() as claims:
        yield claims.claim()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Start three hosts that only a network connects."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network_of(3, tmp_path_factory.mktemp("network")) as network:
        yield network


@pytest.fixture
def launch(network: Network, tmp_path: Path) -> Iterator[LaunchOnHosts]:
    """Start a run on as many hosts as slots are given; kill what is left of it when the test ends."""
    running: list[LaunchedRun] = []

    def start(slots: Sequence[int], *train: object) -> LaunchedRun:
        running.append(LaunchedRun(network.hosts[: len(slots)], slots, tmp_path / "hostfile", network.ssh_config, train))
        return running[-1]

    yield start
    for host in network.hosts:
        host.plug_in()
        host.kill()
    for run in running:
        run.process.wait()
