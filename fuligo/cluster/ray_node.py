"""Ray's processes of one node: `python -m fuligo.cluster.ray_node PARAMETERS`, with fields of `RayParams` as JSON.

`ray start` would also import Ray Serve and, on the head, start Ray's client server and API server. fuligo uses none of them; they would
open two more ports and take 3 s of CPU time before the run can connect.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from ray._private import services
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD

from fuligo.engines.server_process import last_lines

POLL_S = 1.0
FIRST_WORKER_PORT, LAST_WORKER_PORT = 10002, 19999
"""Ports of workers, the same as with `ray start`; by default, `RayParams` lets workers use any port."""

NO_API_SERVER = b"http://127.0.0.1:1"
"""Address at which nothing answers."""


class ServerlessNode(Node):
    """Ray's processes without the API server, which Ray starts even without a dashboard."""

    def start_api_server(self, **_: Any) -> None:
        """Record an address only: without one, the agents of an environment with `ray[default]` log an error every second."""
        client: Any = self.get_gcs_client()
        client.internal_kv_put(DASHBOARD_ADDRESS.encode(), NO_API_SERVER, True, KV_NAMESPACE_DASHBOARD)


def run(parameters: dict[str, Any]) -> str:
    """Run Ray's processes of a node until one of them ends; return a text with the end of its logs, its name and their directory.

    The node is the head unless `gcs_address` is given.
    """
    if "node_ip_address" in parameters:
        parameters["node_ip_address"] = services.resolve_ip_for_localhost(parameters["node_ip_address"])
    is_head = "gcs_address" not in parameters
    if is_head:
        maybe_enable_token_auth_if_token_available()
    ensure_token_if_auth_enabled(create_token_if_missing=False)
    # fuligo uses neither Ray's autoscaler (the head's monitor) nor its copies of the actors' output.
    given: dict[str, Any] = {**parameters, "no_monitor": True, "include_log_monitor": False}
    node = ServerlessNode(RayParams(**given, min_worker_port=FIRST_WORKER_PORT, max_worker_port=LAST_WORKER_PORT), head=is_head)
    while not (ended := node.dead_processes()):
        time.sleep(POLL_S)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    listed = ", ".join(f"{kind} (exit code {process.returncode})" for kind, process in ended)
    directory = Path(node.get_logs_dir_path())  # on this host only, and perhaps deleted when its Slurm job ends
    logs = [directory / f"{kind}.{output}" for kind, _ in ended for output in ("out", "err")]
    said = [lines for log in logs if log.exists() and (lines := last_lines(log))]
    return "\n".join([*said, f"processes of Ray ended: {listed}; their logs are in {directory}"])


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
