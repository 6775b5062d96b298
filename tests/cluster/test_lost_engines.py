"""A host with only an SGLang engine is lost during a rollout; the run continues with the other engine."""

import json
import re
import sys
from pathlib import Path

import pytest

from fuligo.formats.engine_keys import REQUESTS_VARIABLE
from tests.cluster.hosts import Host, Network
from tests.cluster.launched_run import LaunchOnHosts, assert_nothing_left
from tests.e2e.conftest import Job
from tests.e2e.processes import wait_until
from tests.e2e.records import metrics, sample_rows
from tests.sglang.engines import ENVIRONMENT, sglang_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: make install-sglang"),
]

ENGINES = {
    "embedded_num_threads": None,
    "launcher": "ray",
    "num_gpus_per_node": 2,
    "actor_num_gpus_per_node": 1,
    "rollout_backend": "sglang",
    "rollout_num_gpus": 2,
    "engine_python": sglang_python(),
    "engine_env": json.dumps(ENVIRONMENT),
    "router_policy": "round_robin",
    "use_fault_tolerance": True,
    "rollout_health_check_interval": 5,
    "rollout_health_check_timeout": 5,
}
"""One rank and one engine on the first host, the second engine on the other."""
LOAD = """
import sys, urllib.request
question = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
print(urllib.request.urlopen(question, timeout=10).read().decode())
"""

ENGINE_PORT = re.compile(r"sglang\.launch_server.* --port (\d+)", re.DOTALL)


def num_running(host: Host) -> int:
    """Return the number of running requests of the engine there."""
    ports = {pid: int(found[1]) for pid, command in host.processes().items() if (found := ENGINE_PORT.search(command))}
    [port] = set(ports.values())
    environment = Path(f"/proc/{next(iter(ports))}/environ").read_text().split("\0")
    key = next(value.partition("=")[2] for value in environment if value.startswith(f"{REQUESTS_VARIABLE}="))
    answer = host.output(sys.executable, "-c", LOAD, f"http://{host.address}:{port}/v1/loads", key)
    return sum(load["num_running_reqs"] for load in json.loads(answer)["loads"])


@pytest.mark.parametrize(("how", "num_rollout"), [("killed", 5), ("unplugged", 30)])
def test_the_run_continues_with_the_other_engine(
    how: str, num_rollout: int, job: Job, network: Network, launch: LaunchOnHosts, tmp_path: Path
) -> None:
    """A killed host closes its connections; an unplugged one falls silent, and the run must last until it is given up."""
    run_dir = tmp_path / "run"
    run = launch([2, 1], *job(**ENGINES, num_rollout=num_rollout, rollout_max_response_len=200, run_dir=run_dir)[1:])
    run.wait_for_steps(1, run_dir, timeout_s=400)
    other = network.hosts[1]
    wait_until(lambda: num_running(other) >= 4, "a rollout is under way", timeout_s=120)
    if how == "unplugged":
        other.unplug()
    else:
        other.kill()
    said = run.ended(0, timeout_s=400)
    assert f"engine 1 was lost with its machine {other.address}; continuing without it" in said, said

    steps = metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(num_rollout))
    assert all(step["rollout/num_groups_kept"] == 4 and step["rollout/num_failed"] == 0 for step in steps)
    rows = sample_rows(run_dir, "index", "kept", "engine", "versions")
    assert sorted(row["index"] for row in rows) == list(range(num_rollout * 16)), "each sample is there once"
    assert all(row["kept"] for row in rows)
    assert {row["engine"] for row in rows if row["step"] == 0} == {0, 1}
    assert {row["engine"] for row in rows if row["step"] == num_rollout - 1} == {0}
    assert all(set(row["versions"]) == {row["step"]} for row in rows)
    assert_nothing_left(network.hosts[0])
    if how == "unplugged":  # an unplugged host cleans up by itself; a killed one cannot free its shared memory
        other.plug_in()
        assert_nothing_left(other)
