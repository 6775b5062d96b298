"""Two real SGLang engines behind the real router on a CPU, for the whole session."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from fuligo.config.secret import Environment
from fuligo.engines.group import EngineGroup
from fuligo.engines.guard import LOOK_S
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.router import RouterSettings
from fuligo.formats.engine_keys import EngineKeys
from tests import tiny
from tests.e2e.command import HAS_CUDA
from tests.e2e.conftest import warm_commands
from tests.e2e.processes import nothing_left_in_shared_memory
from tests.e2e.stand_ins import ADDRESS, Broker
from tests.e2e.warm_children import patch_popen
from tests.e2e.warm_servers import Servers
from tests.sglang.engines import ENVIRONMENT, server_settings, sglang_python

__all__ = ["warm_commands"]

NUM_ENGINES = 2
SEEN_S = 2 * LOOK_S
"""Time after which a guard has seen the shared memory of its server's processes, and removes it when they are killed."""
KEYS = EngineKeys.new()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sglang/" in item.path.as_posix():
            item.add_marker(pytest.mark.sglang)
            if sglang_python() is None:
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make install-sglang"))


@pytest.fixture(scope="session", autouse=True)
def warm_servers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let SGLang's servers of tests and of their commands fork from a process that has imported SGLang."""
    if not HAS_CUDA:
        servers, address = Servers(), tmp_path_factory.mktemp("servers") / "socket"
        patch_popen(servers)
        Broker(servers, address)
        os.environ[ADDRESS] = str(address)


@pytest.fixture
def nothing_shared_stays() -> Iterator[None]:
    with nothing_left_in_shared_memory():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def claims() -> Iterator[PortClaims]:
    with PortClaims() as claims:
        yield claims


def fleet_settings(
    checkpoint: Path,
    claims: PortClaims,
    logs: Path,
    *,
    num_engines: int = NUM_ENGINES,
    restart: bool = True,
    environment: Mapping[str, str] = ENVIRONMENT,
    health_timeout_s: float = 20.0,
) -> FleetSettings:
    python = sglang_python()
    assert python is not None
    return FleetSettings(
        servers=tuple(
            server_settings(f"engine {n}", checkpoint, claims, logs / f"engine-{n}.txt", number=n, keys=KEYS, environment=environment)
            for n in range(num_engines)
        ),
        router=RouterSettings(
            log_file=logs / "router.txt",
            host="127.0.0.1",
            port=claims.claim(),
            prometheus_port=claims.claim(),
            arguments={"policy": "round_robin"},
            python=str(python),
            environment=Environment(ENVIRONMENT),
            key=KEYS.requests,
        ),
        restart=restart,
        health_interval_s=2.0,
        health_timeout_s=health_timeout_s,
        request_retries=3,
        request_timeout_s=120.0,
    )


@pytest.fixture(scope="session")
def running(checkpoint: Path, claims: PortClaims, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start and stop engines and router in an event loop of their own; each test connects from its own."""
    settings = fleet_settings(checkpoint, claims, tmp_path_factory.mktemp("logs"))
    with asyncio.Runner() as runner:
        fleet = runner.run(Fleet.launch(settings))
        try:
            yield fleet
        finally:
            runner.run(fleet.stop())


@pytest_asyncio.fixture
async def engines(running: Fleet) -> AsyncIterator[EngineGroup]:
    """Connect this test to the session's engines and router."""
    router = running.group.router
    assert router is not None
    group = EngineGroup.connect(running.group.urls, keys=KEYS, router_url=router.url, timeout_s=120.0)
    yield group
    await group.close()
