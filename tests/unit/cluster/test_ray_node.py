"""Ray's processes of a node; tests/cluster starts them."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.dashboard.modules.event.event_agent import EventAgent

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
