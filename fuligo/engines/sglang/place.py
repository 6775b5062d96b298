"""Where an SGLang engine runs: on which host, behind which ports, on which GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.engines.ports import PortClaims
from fuligo.engines.sglang.server import PORTS_PER_ENGINE, ServerPorts


@dataclass(slots=True, frozen=True)
class EnginePlace:
    host: str
    """Of its first node, as driver and trainer reach it."""
    ports: ServerPorts
    """Claimed on its first node."""
    gpu_ids: tuple[int, ...] = ()
    """Of its first node; empty on a CPU, and where the node itself knows them."""
    num_nodes: int = 1


def claim_ports(claims: PortClaims) -> ServerPorts:
    """Those of one engine, on this machine."""
    return ServerPorts(claims.claim(), claims.claim(PORTS_PER_ENGINE), claims.claim())
