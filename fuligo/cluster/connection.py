"""To a Ray cluster: one that runs, or one of this machine that ends with this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fuligo.cluster.launcher import ADDRESS_VARIABLE
from fuligo.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LOCAL: dict[str, Any] = {"_node_ip_address": LOOPBACK}
_QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
"""What a rank or an engine says is in its own log."""


@contextmanager
def connected(*, num_slots: int, device: str, several_nodes: bool) -> Iterator[None]:
    """While the block runs this process is a driver of a Ray cluster.

    The cluster of RAY_ADDRESS; for several nodes the one that this machine is part of; else one is started, which ends with this process.

    Args:
        num_slots: processes that a cluster started here has room for

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--launcher ray: the package ray is not installed; pip install 'fuligo[ray]'") from error
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if os.environ.get(ADDRESS_VARIABLE) or several_nodes:
            _join(os.environ.get(ADDRESS_VARIABLE, "auto"))
        else:
            num_cpus = max(num_slots, os.cpu_count() or 1)
            ray.init("local", include_dashboard=False, num_cpus=num_cpus, num_gpus=0 if device == "cpu" else None, **_LOCAL, **_QUIET)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray took it, to end the process on the spot
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address} takes this run ({error}): start one by `fuligo launch --hostfile F -- ...` or `ray start "
            "--head`, set RAY_ADDRESS, and give every node the same RAY_AUTH_MODE and token"
        ) from error


def has_gpus() -> bool:
    """Of the cluster: some node has."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def node_addresses() -> Mapping[str, str]:
    """Of the living nodes, by node id."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def own_node() -> str:
    """Id of the node that this process is on."""
    import ray

    return ray.get_runtime_context().get_node_id()
