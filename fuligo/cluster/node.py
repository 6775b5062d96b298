"""Ray's own processes on this machine, under a guard that ends them with the process that started them."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from fuligo.engines.server_process import ServerProcess

GRACE_S = 40.0
"""Seconds in which Ray's workers, and the engines under them, shut down."""
START_TIMEOUT_S = 120.0


def head_command(port: int, *, num_cpus: int, num_gpus: int | None, host: str | None = None) -> list[str]:
    """Return the command that starts the head.

    Args:
        num_gpus: None: as many as the machine has
        host: this machine's address, as the other nodes reach it; None: Ray finds one
    """
    options: dict[str, object] = {"port": port, "include-dashboard": "false", "node-ip-address": host}
    return _ray_start(["--head"], {**options, "num-cpus": num_cpus, "num-gpus": num_gpus})


def worker_command(address: str, *, name: str, num_cpus: int | None, num_gpus: int | None, host: str) -> list[str]:
    """Return the command that starts a worker.

    Args:
        address: `host:port` of the head
        name: under which Ray lists the node
        host: this machine's address, as the other nodes reach it
    """
    return _ray_start([], {"address": address, "node-name": name, "num-cpus": num_cpus, "num-gpus": num_gpus, "node-ip-address": host})


def start_node(name: str, command: list[str], log_file: Path, environment: Mapping[str, str]) -> ServerProcess:
    own = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no other job has work on a node that ends
    }
    return ServerProcess(name, command, log_file=log_file, environment={**own, **environment}, grace_s=GRACE_S)


async def head_is_open(head: ServerProcess, host: str, port: int) -> None:
    """Wait until the head takes connections.

    Raises:
        EngineError: it ended, or was not ready in time; carries the last lines of its log
    """

    async def connects() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        return True

    await head.wait_until(connects, START_TIMEOUT_S)


def _ray_start(switches: list[str], options: Mapping[str, object]) -> list[str]:
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *switches, *given, "--block", "--disable-usage-stats"]
