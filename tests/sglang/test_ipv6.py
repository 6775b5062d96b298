"""Engine, router and weight group at IPv6 addresses."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet
from fuligo.engines.sglang.router import launch_router
from tests.sglang.conftest import fleet_settings

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


async def test_a_router_listens_at_an_ipv6_address(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> None:
    settings = replace(fleet_settings(checkpoint, claims, tmp_path, num_engines=0).router, host="::1")
    router = await launch_router(settings)
    try:
        assert router.url == f"http://[::1]:{settings.port}"
        assert await router.workers() == []
    finally:
        await router.stop()


@pytest.mark.slow
async def test_a_fleet_samples_at_ipv6_addresses(checkpoint: Path, claims: PortClaims, tmp_path: Path) -> None:
    """The router by itself is tested above, addresses in tests/unit/engines/test_host.py."""
    settings = fleet_settings(checkpoint, claims, tmp_path, num_engines=1)
    settings = replace(
        settings, servers=tuple(replace(server, host="::1") for server in settings.servers), router=replace(settings.router, host="::1")
    )
    fleet = await Fleet.launch(settings)
    try:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        assert len((await fleet.group.generate([20, 21, 22], params, rid="one", timeout_s=120)).output_ids) == 4
    finally:
        await fleet.stop()
