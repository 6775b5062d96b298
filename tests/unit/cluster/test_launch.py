"""Command that reaches the other hosts of a launch, and hosts that do not join; tests/cluster/test_launch.py has those that do."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuligo.cluster import launch
from fuligo.cluster.hostfile import Host
from fuligo.cluster.launch import LaunchedCluster, LaunchSettings, connection_command
from fuligo.engines.host import PortClaims
from fuligo.errors import ConfigError, EngineError


@pytest.mark.parametrize("template", ["sh -c {command}", "sh -o 'ProxyCommand=nc %h {port}' -- {host} {command}"])
def test_connection_command_splits_like_a_shell(template: str) -> None:
    program, *_, command = connection_command(template)
    assert (program, command) == ("sh", "{command}")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("sh '{host} {command}", "no closing quotation"),
        ("sh {host} {cmd}", "has no {command}"),
        ("no-such-program {host} {command}", "no-such-program is not installed here"),
        ("", "has no {command}"),
    ],
)
def test_connection_command_names_what_is_wrong(template: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        connection_command(template)
    assert said in str(raised.value)


async def test_hosts_that_are_silent_until_the_deadline_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has started, and one worker has joined it."""
    head = SimpleNamespace(check_alive=lambda: None, stop=lambda: asyncio.sleep(0))
    monkeypatch.setattr(launch, "start_node", lambda *_: head)
    workers = tuple(Host(f"127.0.0.{number}", 2) for number in (3, 4))
    cluster = LaunchedCluster(
        LaunchSettings("127.0.0.2", 2, workers, port=6379, device="cpu", connection=("sh", "-c", "cat"), logs=tmp_path, timeout_s=0.1)
    )
    ray = SimpleNamespace(nodes=lambda: [{"NodeName": "127.0.0.4", "Alive": True}, {"NodeName": "127.0.0.3", "Alive": False}])
    try:
        with pytest.raises(EngineError, match=r"1 of 2 workers did not join 127\.0\.0\.2:6379 within 0\.1 s: 127\.0\.0\.3\. Check"):
            await cluster._wait_for_workers(ray)
    finally:
        await cluster.stop()


async def test_a_worker_that_ends_is_named_while_the_head_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting:
        """Head that never accepts a connection."""

        async def wait_until(self, ready: Callable[[], Awaitable[bool]], _: float) -> None:
            while not await ready():  # noqa: ASYNC110  # as a process is polled
                await asyncio.sleep(0.01)

        async def stop(self) -> None:
            pass

    monkeypatch.setattr(launch, "start_node", lambda *_: Starting())
    with PortClaims() as claims:
        connection = ("sh", "-c", "echo no such host; exit 3")
        workers = (Host("127.0.0.3", 2),)
        settings = LaunchSettings("127.0.0.2", 2, workers, claims.claim(), device="cpu", connection=connection, logs=tmp_path, timeout_s=60)
        cluster = LaunchedCluster(settings)
        try:
            with pytest.raises(EngineError, match=r"the worker on 127\.0\.0\.3 ended with exit code 3:\nno such host"):
                await cluster.wait_ready()
        finally:
            await cluster.stop()
