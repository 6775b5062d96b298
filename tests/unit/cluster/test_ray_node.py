"""Ray's processes of a node; tests/cluster starts them."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.dashboard.modules.event.event_agent import EventAgent

from fuligo.cluster import ray_node
from fuligo.cluster.ray_node import NO_API_SERVER, ServerlessNode


class Stored(dict[tuple[bytes, bytes], bytes]):
    """Values of Ray's head, by namespace and key."""

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        self[namespace, key] = value

    async def async_internal_kv_get(self, key: bytes, *, namespace: bytes, timeout: float) -> bytes | None:
        return self.get((namespace, key))


async def test_agents_do_not_ask_for_the_api_server_forever() -> None:
    """They do with the packages of `ray[default]`, which the tests' environment lacks, and log an error each time."""
    stored = Stored()
    node: Any = ServerlessNode.__new__(ServerlessNode)
    node._gcs_client = stored
    node.start_api_server(include_dashboard=None, raise_on_failure=False)
    agent: Any = EventAgent.__new__(EventAgent)
    agent._gcs_client, agent._dashboard_http_address = stored, None
    async with asyncio.timeout(10):
        assert await agent._get_dashboard_http_address() == NO_API_SERVER.decode()


@pytest.mark.parametrize("role", [{"gcs_server_port": 6379}, {"gcs_address": "127.0.0.1:6379"}])
def test_no_node_starts_without_the_token_that_it_should_require(role: dict[str, Any], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fuligo.cluster.ray_node", json.dumps({**role, "temp_dir": str(tmp_path / "ray")})]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "no authentication token was found" in ended.stderr
    assert not (tmp_path / "ray").exists()


class EndedNode:
    """Node whose raylet has crashed, with logs in a directory."""

    logs = Path()
    is_killed = False

    def __init__(self, parameters: Any, *, head: bool) -> None:
        del parameters, head

    def dead_processes(self) -> list[tuple[str, Any]]:
        return [("raylet", SimpleNamespace(returncode=-11))]

    def get_logs_dir_path(self) -> str:
        return str(self.logs)

    def kill_all_processes(self, **_: bool) -> None:
        EndedNode.is_killed = True


def test_the_reason_of_an_end_leaves_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's logs may be on another host, and gone with the job."""
    (tmp_path / "raylet.out").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "raylet.err").write_text("*** SIGSEGV received\n")
    (tmp_path / "gcs_server.out").write_text("unrelated\n")
    monkeypatch.setattr(EndedNode, "logs", tmp_path)
    monkeypatch.setattr(EndedNode, "is_killed", False)
    monkeypatch.setattr(ray_node, "ServerlessNode", EndedNode)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    said = ray_node.run({"gcs_address": "127.0.0.1:6379"}).splitlines()
    assert said[-3:] == [
        "line 99",
        "*** SIGSEGV received",
        f"processes of Ray ended: raylet (exit code -11); their logs are in {tmp_path}",
    ]
    assert len(said) < 50 and "unrelated" not in said and EndedNode.is_killed
