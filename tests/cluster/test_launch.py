"""`fuligo launch` with a hostfile of two Ray nodes on one machine, and a shell in place of ssh."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.cluster.node import TOKEN_VARIABLE
from tests.e2e.command import fail, fuligo
from tests.e2e.conftest import Job, Start
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.records import metrics

SHELL = "bash -c {command}"


def hostfile(directory: Path, text: str) -> Path:
    path = directory / "hosts"
    path.write_text(text)
    return path


def launch(hosts: Path, port: int, *, ssh: str = SHELL, timeout_s: int = 120) -> list[str]:
    return ["launch", "--hostfile", str(hosts), "--head-port", str(port), "--ssh", ssh, "--timeout-s", str(timeout_s), "--"]


def test_two_nodes_train_and_end_with_the_driver(
    job: Job, start: Start, free_port: int, warm_workers: dict[str, str], tmp_path: Path
) -> None:
    """Each node has a rank; after the driver is killed, both nodes end."""
    hosts = hostfile(tmp_path, "127.0.0.2 slots=2\n127.0.0.3 slot=2  # MPI writes slots\n")
    run_dir = tmp_path / "run"
    train = job(actor_num_nodes=2, actor_num_gpus_per_node=1, num_rollout=1000, run_dir=run_dir)
    process = start(*launch(hosts, free_port), *train[1:], warm=True, **warm_workers)

    def raylets() -> list[int]:
        return [pid for pid, command in descendants(process.pid).items() if "raylet/raylet" in command]

    wait_until(lambda: len(raylets()) == 2 or process.poll() is not None, "both nodes are up", timeout_s=120)
    stranger = stranger_at(f"127.0.0.2:{free_port}")  # while the run starts
    wait_until(lambda: len(metrics(run_dir)) >= 2 or process.poll() is not None, "two steps are recorded", timeout_s=300)
    assert process.poll() is None, process.communicate()[0]
    family = descendants(process.pid)
    assert len(raylets()) == 2, family
    assert sum("ray::TrainerRank" in command for command in family.values()) == 2, family
    assert not any("ray::IDLE" in command for command in family.values()), "Ray starts workers for actors only"
    assert not any(unused in command for command in family.values() for unused in ("ray.util.client.server", "dashboard/dashboard.py"))
    assert_closed(stranger, raylets()[0], family)
    assert [path.name for path in run_dir.glob("*.txt") if path.stat().st_mode & 0o077] == []

    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    wait_until(lambda: not alive(family), "all processes of both nodes have ended", timeout_s=120)


STRANGER = """
import os, sys
import ray

try:
    ray.init(address=sys.argv[1], log_to_driver=False)
    print("inside", ray.get(ray.remote(os.getpid).remote(), timeout=60))
except ConnectionError as error:
    print("outside:", error)
"""


def stranger_at(address: str) -> subprocess.Popen[str]:
    """Start a process that does not have the cluster's token and tries to run code in the cluster."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # by default it would try for 20 s, while the run trains on
    command = [sys.executable, "-c", STRANGER, address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def assert_closed(stranger: subprocess.Popen[str], raylet: int, family: dict[int, str]) -> None:
    """Check that the stranger was kept out, and that nobody reads the cluster's token from a command line."""
    inherited = dict(part.split("=", 1) for part in Path(f"/proc/{raylet}/environ").read_text().split("\0") if "=" in part)
    token = inherited[TOKEN_VARIABLE]
    assert len(token) == 64 and not any(token in command for command in family.values())
    said, errors = stranger.communicate(timeout=240)
    assert said.startswith("outside:"), said + errors
    assert "InvalidAuthToken" in errors


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named(job: Job, free_port: int, tmp_path: Path) -> None:
    """The test of a failing Slurm step, below, covers the same message."""
    hosts = hostfile(tmp_path, "127.0.0.2 slots=2\n127.0.0.3 slots=2\n")
    train = job(actor_num_nodes=2, actor_num_gpus_per_node=1, run_dir=tmp_path / "run")
    said = fail(1, *launch(hosts, free_port, ssh="bash -c 'echo no route to {host}; exit 255' {command}"), *train[1:])
    assert "the worker on 127.0.0.3 ended with exit code 255: no route to 127.0.0.3" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rm-type", "none_such"], "--rm-type none_such is not a built-in reward"),
        (["--actor-num-nodes", "3"], "needs 1, 1, 1 slots on 3 hosts, but the hosts have: 127.0.0.2 2, 127.0.0.3 2"),
    ],
)
def test_wrong_flags_are_refused_before_a_host_is_contacted(flags: list[str], said: str, job: Job, free_port: int, tmp_path: Path) -> None:
    hosts = hostfile(tmp_path, "127.0.0.2 slots=2\n127.0.0.3 slots=2\n")
    train = job(actor_num_nodes=2, actor_num_gpus_per_node=1, run_dir=tmp_path / "run")
    assert said in fail(2, *launch(hosts, free_port, ssh=f"sh -c 'touch {tmp_path}/contacted' {{command}}"), *train[1:], *flags)
    assert not (tmp_path / "contacted").exists()


def test_a_port_in_use_is_named(job: Job, free_port: int, tmp_path: Path) -> None:
    hosts = hostfile(tmp_path, "127.0.0.2 slots=2\n")
    with socket.create_server(("", free_port)):
        said = fail(2, *launch(hosts, free_port), *job(run_dir=tmp_path / "run")[1:])
    assert f"port {free_port} of this machine" in said and "--head-port" in said


def slurm_job(directory: Path, srun: str) -> dict[str, str]:
    """Return the variables of a job on 127.0.0.2 and 127.0.0.3. `srun`: shell code of a stand-in for srun, which gets srun's arguments."""
    path = directory / "srun"
    path.write_text(f'#!/bin/bash\necho "$@" >> {directory}/srun.log\n{srun}\n')
    path.chmod(0o755)
    return {"SLURM_JOB_NODELIST": "127.0.0.[2-3]", "PATH": f"{directory}:{os.environ['PATH']}"}


def assert_one_step_of_slurm(directory: Path) -> None:
    [step] = (directory / "srun.log").read_text().splitlines()
    assert step.startswith("--overlap --nodes=1 --ntasks=1 ") and " --nodelist=127.0.0.3 sh -c " in step


@pytest.mark.slow
def test_srun_starts_the_workers_of_a_slurm_job(job: Job, start: Start, free_port: int, tmp_path: Path) -> None:
    """The next test covers srun's command without a run, and the first test of this file runs such a command in place of ssh."""
    run_dir = tmp_path / "run"
    train = job(actor_num_nodes=2, actor_num_gpus_per_node=1, num_rollout=1, run_dir=run_dir, num_gpus_per_node=2)
    slurm = slurm_job(tmp_path, 'exec sh -c "${@: -1}"')
    process = start("launch", "--head-port", free_port, "--timeout-s", 120, "--", *train[1:], warm=True, **slurm)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert len(metrics(run_dir)) == 1
    assert_one_step_of_slurm(tmp_path)


def test_a_failing_step_of_a_slurm_job_is_named(job: Job, free_port: int, tmp_path: Path) -> None:
    """The stand-in only parses the command that would start the worker; tests/unit/cluster/test_launch.py covers a silent host."""
    train = job(actor_num_nodes=2, actor_num_gpus_per_node=1, run_dir=tmp_path / "run", num_gpus_per_node=2)
    slurm = slurm_job(tmp_path, 'sh -n -c "${@: -1}" && echo step denied; exit 1')
    said = fail(1, "launch", "--head-port", free_port, "--timeout-s", 120, "--", *train[1:], **slurm)
    assert "the worker on 127.0.0.3 ended with exit code 1: step denied" in said
    assert_one_step_of_slurm(tmp_path)

    other = fuligo("launch", "--", *train[1:], SLURM_PROCID="1", **slurm)
    assert (other.returncode, other.stdout) == (0, "Slurm task 1 has nothing to do: task 0 starts the run, and a worker on every node\n")


def test_launch_without_hosts_names_where_they_may_come_from(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAY_ADDRESS", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(variable, raising=False)
    said = fail(2, "launch", "--", *job()[1:])
    assert "use --hostfile F, start it in a Slurm job (SLURM_JOB_NODELIST), or set RAY_ADDRESS" in said
