"""Engine, router and keys of a run on two hosts, attacked from a third host and from the two themselves."""

import base64
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fuligo.formats.engine_keys import CONTROL_VARIABLE, REQUESTS_VARIABLE
from tests.cluster.hosts import Host, Network
from tests.cluster.launched_run import LaunchOnHosts
from tests.cluster.test_sglang_run import task
from tests.e2e.records import metrics
from tests.sglang.engines import sglang_python
from tests.sglang.test_keys import CONTROL, REQUESTS, Trap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: make install-sglang"),
]
ROUTER_VARIABLE = "FULIGO_ROUTER_KEY"
ENGINE_COMMAND, ROUTER_COMMAND = "sglang.launch_server", "sglang_router.launch_router"
CALL = """
import json, sys, urllib.error, urllib.request

base, paths, key, body = json.loads(sys.stdin.read())
found = {}
for path in paths:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base}/{path}", json.dumps(body).encode(), headers), timeout=60) as answer:
            found[path] = answer.status
    except urllib.error.HTTPError as error:
        found[path] = error.code
    except OSError as error:
        found[path] = str(error)
print(json.dumps(found))
"""
"""Program that makes POST requests without anything of fuligo, and prints their statuses, or why there was no connection."""


def statuses(host: Host, url: str, paths: tuple[str, ...], key: str | None, body: object) -> dict[str, int | str]:
    """Make requests from a host."""
    given = json.dumps([url, paths, key, body])
    done = subprocess.run(host.command(sys.executable, "-c", CALL), input=given, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def argument(command: str, name: str) -> str:
    """Return an argument of a command line."""
    words = command.split()
    return words[words.index(name) + 1]


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def server(hosts: list[Host], part: str, variable: str) -> tuple[Host, str, Mapping[str, str]]:
    """Find a server by a part of its command; return its host, its command and the variables that it was started with."""
    for host in hosts:
        for pid, command in host.processes().items():
            if part in command and f"{variable}=" in (text := environment_of(pid)) and " --port " in command:
                return host, command, dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    raise AssertionError({host.name: host.processes() for host in hosts})


def written(run_dir: Path, hosts: list[Host]) -> Iterator[Path]:
    """Yield the files that the run and the Ray of its hosts have written."""
    ray = [Path(f"/proc/{host.init_pid}/root/tmp/fuligo-ray-0") for host in hosts]
    yield from (path for directory in (run_dir, *ray) for path in directory.rglob("*") if path.is_file())


def test_strangers_on_three_hosts_are_refused(launch: LaunchOnHosts, network: Network, tmp_path: Path) -> None:
    """A rank on one host trains with an engine on the other, undisturbed."""
    run_dir, trap = tmp_path / "run", tmp_path / "ran"
    sizes = ["--num-rollout", 1000, "--num-gpus-per-node", 1, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1]
    run = launch([1, 1], *task(run_dir), *sizes)
    run.wait_for_steps(1, run_dir, timeout_s=600)
    hosts = list(network.hosts)
    home, router, router_environment = server(hosts, ROUTER_COMMAND, ROUTER_VARIABLE)
    engine_host, engine, engine_environment = server(hosts, ENGINE_COMMAND, REQUESTS_VARIABLE)
    requests, control = engine_environment[REQUESTS_VARIABLE], engine_environment[CONTROL_VARIABLE]
    router_key = router_environment[ROUTER_VARIABLE]
    assert len({requests, control, router_key}) == 3 and all(len(key) == 64 for key in (requests, control, router_key))
    engine_url = f"http://{argument(engine, '--host')}:{argument(engine, '--port')}"
    assert engine_url.startswith(f"http://{engine_host.address}:"), "other hosts reach it, so that only its keys protect it"

    update = {
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(Trap(trap))).decode()],
        "load_format": None,
        "weight_version": "99",
    }
    for host in hosts:
        for key in (None, "wrong", requests, router_key):
            assert statuses(host, engine_url, CONTROL, key, update) == dict.fromkeys(CONTROL, 401), (host.name, key)
        for key in (None, "wrong", control, router_key):
            assert statuses(host, engine_url, REQUESTS, key, update) == dict.fromkeys(REQUESTS, 401), (host.name, key)
    assert not trap.exists()

    port, admin = argument(router, "--port"), ("workers", "generate", "flush_cache")
    body = {"url": "http://10.77.0.3:9", "input_ids": [1], "sampling_params": {}}
    for key in (None, "wrong", requests, control):
        assert statuses(home, f"http://127.0.0.1:{port}", admin, key, body) == dict.fromkeys(admin, 401)
    for host in hosts:  # even with the key: it listens on loopback
        for number in (port, argument(router, "--prometheus-port")):
            refused = statuses(host, f"http://{home.address}:{number}", admin, router_key, body)
            assert all("Connection refused" in str(answer) for answer in refused.values()), refused

    sample = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    assert statuses(hosts[2], engine_url, ("generate",), requests, sample) == {"generate": 200}, "the key is what opens it"
    assert statuses(home, f"http://127.0.0.1:{port}", ("generate",), router_key, sample) == {"generate": 200}

    assert_hidden((requests, control, router_key), run_dir, hosts)
    run.wait_for_steps(len(metrics(run_dir)) + 2, run_dir)
    steps = metrics(run_dir)
    assert max(step["train/logprob_abs_diff"] for step in steps) < 1e-3
    run.send(signal.SIGINT)
    said = run.ended(130)
    assert not any(key in said for key in (requests, control, router_key))
    assert_hidden((requests, control, router_key), run_dir, hosts)
    run.assert_nothing_left()


def assert_hidden(keys: tuple[str, ...], run_dir: Path, hosts: list[Host]) -> None:
    """Check that no command line and no file has a key, and no environment except that of the engine and the router."""
    processes = {pid: command for host in hosts for pid, command in host.processes().items()}
    assert not [command for command in processes.values() if any(key in command for key in keys)]
    holders = [command for pid, command in processes.items() if any(key in environment_of(pid) for key in keys)]
    assert not [command for command in holders if "sglang" not in command]
    files = list(written(run_dir, hosts))
    assert {"config.yaml", "log.txt", "engine-0.txt", "router.txt", "raylet.out", "gcs_server.out"} <= {file.name for file in files}
    assert not [file for file in files if any(key.encode() in file.read_bytes() for key in keys)]
