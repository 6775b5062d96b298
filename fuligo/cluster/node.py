"""Ray's processes on this machine, under a guard that ends them when the process that started them ends."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fuligo.engines.host import PortClaims
from fuligo.engines.server_process import ServerProcess
from fuligo.formats.private import kept_directory

GRACE_S = 40.0
"""Seconds for Ray's workers, and the engines that they started, to shut down."""
START_TIMEOUT_S = 120.0
AGENT_PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port", "runtime-env-agent-port")
"""Options for the ports of Ray's agents. If agents choose their own ports, Ray ends the node unless they report them within 15 s, and on a
busy machine or a slow disk their imports alone take longer."""
MAX_ROOT_LENGTH = 8
"""Longest path of a temporary directory, in characters; with a longer one, paths of Ray's sockets exceed the limit of 107 characters."""


def head_command(port: int, claims: PortClaims, *, num_cpus: int, num_gpus: int | None, host: str | None = None) -> list[str]:
    """Return the command that starts Ray's head on this machine.

    Args:
        claims: port claims that stay open while the head runs
        num_gpus: number of GPUs to offer; None: all of the machine
        host: address at which the other nodes reach this machine; None: Ray chooses one
    """
    options: dict[str, object] = {"port": port, "include-dashboard": "false", "node-ip-address": host}
    return _ray_start(["--head", "--no-monitor"], {**options, "num-cpus": num_cpus, "num-gpus": num_gpus}, claims)


def worker_command(address: str, claims: PortClaims, *, name: str, num_cpus: int | None, num_gpus: int | None, host: str) -> list[str]:
    """Return the command that starts a Ray worker on this machine.

    Args:
        address: `host:port` of the head
        claims: port claims that stay open while the worker runs
        name: name of the node in Ray
        host: address at which the other nodes reach this machine
    """
    options = {"address": address, "node-name": name, "num-cpus": num_cpus, "num-gpus": num_gpus, "node-ip-address": host}
    return _ray_start([], options, claims)


def session_root() -> Path:
    """Return the directory for Ray's sessions, inside a directory that no other user can enter.

    Ray makes its directories, including those of its sockets, writable for every user. In the default location, /tmp/ray, another user
    could replace a socket to which a rank connects, and send the rank code to run.
    """
    name = f"fuligo-ray-{os.geteuid()}"
    root = next((root for root in (tempfile.gettempdir(), "/tmp") if len(root) <= MAX_ROOT_LENGTH), tempfile.gettempdir())
    return kept_directory(Path(root, name), f"{name}-") / "ray"


_HEALTH_TIMEOUT = "RAY_health_check_timeout_ms"
"""Timeout of one health check. Ray gives up a host after five unanswered checks, 3 s apart. With 5 s that takes 40 s, as for a silent rank,
instead of 65 s."""
_PRESTART = "RAY_prestart_worker_first_driver"
"""Switch of the idle worker processes, one for each CPU, that Ray starts by default when the run connects. Every one imports Ray, and the
run's actors are far fewer than the CPUs of a large node."""


def start_node(name: str, command: list[str], log_file: Path, environment: Mapping[str, str]) -> ServerProcess:
    """Start a process of Ray. `environment` overrides fuligo's own settings of Ray, and both override this process's environment."""
    own = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing else runs on the run's nodes
        _HEALTH_TIMEOUT: os.environ.get(_HEALTH_TIMEOUT, "5000"),
        _PRESTART: os.environ.get(_PRESTART, "0"),
    }
    command = [*command, f"--temp-dir={session_root()}"]
    return ServerProcess(name, command, log_file=log_file, environment={**own, **environment}, grace_s=GRACE_S)


async def head_is_open(head: ServerProcess, host: str, port: int) -> None:
    """Wait until the head accepts connections. Raises EngineError with the last lines of its log if it ended, or was not ready in time."""

    async def connects() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        return True

    await head.wait_until(connects, START_TIMEOUT_S)


def _ray_start(switches: list[str], options: Mapping[str, object], claims: PortClaims) -> list[str]:
    agents = {name: claims.claim() for name in AGENT_PORTS}
    # Neither Ray's autoscaler (the head's monitor) nor its copies of the actors' output has a reader here.
    given = [f"--{name}={value}" for name, value in {**options, **agents, "include-log-monitor": "false"}.items() if value is not None]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *switches, *given, "--block", "--disable-usage-stats"]
