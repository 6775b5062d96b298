"""Connection to a Ray cluster that already runs, or that is started on this machine for the duration of the connection."""

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from fuligo.cluster.node import head_is_open, start_command, start_node
from fuligo.config.launcher import ADDRESS_VARIABLE
from fuligo.engines.host import LOOPBACK, PortClaims
from fuligo.errors import ConfigError
from fuligo.limits import num_cores

ANSWER_TIMEOUT_S = 10.0
"""Seconds in which the address must accept a connection."""
_RAY_OPTIONS: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
"""Options of `ray.init` that leave logging to fuligo: ranks and engines write to their own logs."""


@asynccontextmanager
async def connected(*, num_slots: int, device: str, several_nodes: bool, log_file: Path) -> AsyncIterator[None]:
    """Make this process a driver of a Ray cluster while the block runs.

    The cluster is the one at RAY_ADDRESS, or for several nodes the one that this machine is part of. Otherwise one is started on this
    machine, and stopped at the end of the block. Raises ConfigError if the cluster does not answer, and EngineError if none can be started.

    Args:
        num_slots: number of processes that a cluster started here must have room for
        log_file: log of a cluster that is started here
    """
    if os.environ.get(ADDRESS_VARIABLE) or several_nodes:
        with _driver(os.environ.get(ADDRESS_VARIABLE, "auto")):
            yield
        return
    num_cpus = max(num_slots, num_cores())
    with PortClaims() as claims:
        port = claims.claim()
        num_gpus = 0 if device == "cpu" else None
        head = start_node("Ray", start_command(claims, head_port=port, num_cpus=num_cpus, num_gpus=num_gpus), log_file)
        try:
            await head_is_open(head, LOOPBACK, port)
            with _driver(f"{LOOPBACK}:{port}"):
                yield
        finally:
            await head.stop()


@contextmanager
def _driver(address: str) -> Iterator[None]:
    _require_answer(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **_RAY_OPTIONS)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(_no_cluster(address, error)) from error
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray replaces the handler with one that ends the process at once
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Check that something listens at the address; otherwise Ray would retry for minutes and ignore Ctrl-C and SIGTERM meanwhile.

    Raises ConfigError if nothing listens at `HOST:PORT`, or at what `auto` resolves to. Other forms of address are left to Ray.
    """
    if address == "auto":
        # `ray start` writes an address to disk, which remains until `ray stop` even if the cluster is gone.
        address = (None if services.find_gcs_addresses() else services.find_bootstrap_address(None)) or address
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(_no_cluster(address, error)) from error


def _no_cluster(address: str, error: Exception) -> str:
    return (
        f"cannot connect to a Ray cluster at {address} ({error}); start one with `fuligo launch --hostfile F -- ...` or `ray start "
        "--head`, set RAY_ADDRESS, and give every node the same RAY_AUTH_MODE and token"
    )
