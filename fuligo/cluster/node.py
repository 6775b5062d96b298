"""Ray's processes on this machine, and the environment of the run's processes on Ray: token, network interface. Does not import Ray.

A guard ends Ray's processes when the process that started them ends.
"""

import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path

import psutil

from fuligo.config.launcher import ADDRESS_VARIABLE
from fuligo.engines.host import PortClaims, is_loopback, use_loopback_interface
from fuligo.engines.server_process import ServerProcess
from fuligo.formats.private import kept_directory

GRACE_S = 40.0
"""Seconds for Ray's workers, and the engines that they started, to shut down."""
START_TIMEOUT_S = 120.0
AGENT_PORTS = ("metrics_agent_port", "dashboard_agent_listen_port", "metrics_export_port", "runtime_env_agent_port")
"""Parameters for the ports of Ray's agents. If agents choose their own ports, Ray ends the node unless they report them within 15 s, and on
a busy machine or a slow disk their imports alone take longer."""
MAX_ROOT_LENGTH = 8
"""Longest path of a temporary directory, in characters; with a longer one, paths of Ray's sockets exceed the limit of 107 characters."""


def start_command(
    claims: PortClaims,
    *,
    num_cpus: int,
    num_gpus: int | None,
    host: str | None = None,
    head_port: int | None = None,
    address: str | None = None,
    name: str | None = None,
) -> list[str]:
    """Return the command that starts Ray on this machine, as the head at `head_port`, or as a worker of the head at `address`.

    Args:
        claims: port claims that stay open while Ray runs
        num_gpus: number of GPUs to offer; None: all of the machine
        host: address at which the other nodes reach this machine; None: Ray chooses one
        name: name of the node in Ray
    """
    parameters = {"gcs_server_port": head_port, "gcs_address": address, "node_name": name, "node_ip_address": host}
    parameters |= {"num_cpus": num_cpus, "num_gpus": num_gpus, **{port: claims.claim() for port in AGENT_PORTS}}
    parameters |= {"temp_dir": str(session_root())}
    given = {name: value for name, value in parameters.items() if value is not None}
    return [sys.executable, "-m", "fuligo.cluster.ray_node", json.dumps(given)]


def session_root() -> Path:
    """Return the directory for Ray's sessions, inside a directory that no other user can enter.

    Ray makes its directories, including those of its sockets, writable for every user. In the default location, /tmp/ray, another user
    could replace a socket to which a rank connects, and send the rank code to run.
    """
    name = f"fuligo-ray-{os.geteuid()}"
    root = next((root for root in (tempfile.gettempdir(), "/tmp") if len(root) <= MAX_ROOT_LENGTH), tempfile.gettempdir())
    return kept_directory(Path(root, name), f"{name}-") / "ray"


def start_node(name: str, command: list[str], log_file: Path) -> ServerProcess:
    """Start a process of Ray; variables of this process's environment override those in `given`."""
    given = {
        # Ray gives up on a host after five unanswered checks, 3 s apart. With a timeout of 5 s per check, that takes 40 s, as for a silent
        # rank, instead of 65 s.
        "RAY_health_check_timeout_ms": "5000",
        # By default Ray starts an idle worker for each CPU when the run connects. Every one imports Ray, and the run's actors are far
        # fewer than the CPUs of a large node.
        "RAY_prestart_worker_first_driver": "0",
    }
    own = {name: os.environ.get(name, value) for name, value in given.items()}
    own["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # nothing else runs on the run's nodes
    own["RAY_USAGE_STATS_ENABLED"] = "0"
    return ServerProcess(name, command, log_file=log_file, environment=own, grace_s=GRACE_S)


async def head_is_open(head: ServerProcess, host: str, port: int, check: Callable[[], None] = lambda: None) -> None:
    """Wait until the head accepts connections, calling `check` before each attempt.

    Raises what `check` raises, or EngineError with the last lines of the head's log if it ended, or was not ready in time.
    """

    async def connects() -> bool:
        check()
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        return True

    await head.wait_until(connects, START_TIMEOUT_S)


TOKEN_VARIABLE = "RAY_AUTH_TOKEN"

GUARDS_LIVE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Variables for actors that keep Ray from killing an engine's guard, which shuts the engine down cleanly."""


def prepare_environment(*, several_nodes: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that Ray reads on import, unless the user set them."""
    starts_here = not several_nodes and not environment.get(ADDRESS_VARIABLE)
    has_token = environment.get(TOKEN_VARIABLE) or environment.get("RAY_AUTH_TOKEN_PATH")
    if starts_here and not has_token and environment.get("RAY_AUTH_MODE", "token") == "token":
        environment.update(token_environment())  # a cluster that is started here belongs to this run alone
    for name, value in GUARDS_LIVE.items():
        environment.setdefault(name, value)


def token_environment() -> dict[str, str]:
    """Return the environment that makes a cluster's processes require a new random token; anyone who has it may use the cluster."""
    return {"RAY_AUTH_MODE": "token", TOKEN_VARIABLE: secrets.token_hex(32)}


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo, TensorPipe and NCCL of this process and its children use the interface with this address, unless the user chose one.

    A loopback address, on a single node, leaves NCCL's choice unchanged.
    """
    if is_loopback(address):
        use_loopback_interface(environment)
        return
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, addresses in interfaces if any(its.address.partition("%")[0] == address for its in addresses)), None)
    if name is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        environment.setdefault("TP_SOCKET_IFNAME", name)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # `=`: NCCL would take a bare name as a prefix
