"""`ray job submit -- python3 train.py ...`, as in launch scripts: the job finds its cluster and leaves nothing behind."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuligo.cluster.node import token_environment
from fuligo.engines.host import PortClaims
from fuligo.engines.server_process import ServerProcess
from tests.e2e.command import REPOSITORY, environment
from tests.e2e.conftest import Job
from tests.e2e.processes import alive, descendants, shared_memory, wait_until
from tests.e2e.records import metrics

pytest.importorskip("aiohttp_cors", reason="the job server needs ray[default]: pip install 'ray[default]'")

pytestmark = pytest.mark.slow

MARK = {"FULIGO_TEST_MARK": "of the job"}


class RayHead:
    """Ray cluster of one node with a job server that requires a token."""

    def __init__(self, port: int, dashboard_port: int, log_file: Path) -> None:
        address = {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard_port}"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the job's python3
        self._environment = {**environment(PATH=path), **token_environment(), **address}
        start = ["start", "--head", f"--port={port}", f"--dashboard-port={dashboard_port}", "--num-cpus=4", "--block"]
        self.process = ServerProcess(
            "Ray", [sys.executable, "-m", "ray.scripts.scripts", *start], log_file=log_file, environment=self._environment
        )

    def ray(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False, timeout=240)

    def submit(self, name: str, *train: object) -> None:
        command = ["--submission-id", name, "--no-wait", "--runtime-env-json", json.dumps({"env_vars": MARK})]
        done = self.ray("job", "submit", *command, "--", "python3", REPOSITORY / "train.py", *train)
        assert done.returncode == 0, done.stdout + done.stderr

    def has(self, name: str, ending: str) -> bool:
        """Return whether a job has ended so: `succeeded`, `failed` or `was stopped`."""
        return f"Job '{name}' {ending}" in self.ray("job", "status", name).stdout

    def log(self, name: str) -> str:
        return self.ray("job", "logs", name).stdout

    def processes(self) -> dict[int, str]:
        return descendants(self.process.pid)

    def marked(self) -> dict[int, str]:
        """Return the processes that have the environment of the job."""
        return {pid: command for pid, command in self.processes().items() if _has_mark(pid)}


def _has_mark(pid: int) -> bool:
    try:
        return b"FULIGO_TEST_MARK=of the job" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    with PortClaims() as claims:
        head = RayHead(claims.claim(), claims.claim(), tmp_path_factory.mktemp("ray") / "head.txt")
        wait_until(lambda: head.ray("job", "list").returncode == 0, "the job server answers", timeout_s=120)
        yield head
        asyncio.run(head.process.stop())


def assert_nothing_left(head: RayHead, family: dict[int, str]) -> None:
    wait_until(lambda: not alive(family) and not head.marked(), "all processes of the job have ended", timeout_s=120)


def test_a_job_trains(head: RayHead, job: Job, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.submit("trains", *job(run_dir=run_dir, actor_num_gpus_per_node=2, num_rollout=20)[1:])
    wait_until(lambda: len(metrics(run_dir)) >= 2, "two steps are recorded", timeout_s=120)
    family = head.marked()
    for part in ("ray::NodeAgent", "fuligo serve", "train.py"):
        assert any(part in command for command in family.values()), (part, family)
    assert sum("ray::TrainerRank" in command for command in family.values()) == 2, family
    wait_until(lambda: head.has("trains", "succeeded"), "the job ends", timeout_s=120)
    assert len(metrics(run_dir)) == 20
    assert_nothing_left(head, family)


def test_a_job_that_fails_says_why(head: RayHead, job: Job, tmp_path: Path) -> None:
    head.submit("fails", *job(run_dir=tmp_path / "run", actor_num_gpus_per_node=2, hf_checkpoint=tmp_path)[1:])
    wait_until(lambda: head.has("fails", "failed"), "the job fails", timeout_s=120)
    assert f"--hf-checkpoint: {tmp_path}/config.json is missing" in head.log("fails"), head.log("fails")
    assert_nothing_left(head, {})


def test_a_stopped_job_takes_its_processes_along(head: RayHead, job: Job, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.submit("stopped", *job(run_dir=run_dir, actor_num_gpus_per_node=2, num_rollout=100_000)[1:])
    wait_until(lambda: len(metrics(run_dir)) >= 2, "two steps are recorded", timeout_s=120)
    family = head.marked()
    assert sum("ray::TrainerRank" in command for command in family.values()) == 2, family
    head.ray("job", "stop", "stopped")
    wait_until(lambda: head.has("stopped", "was stopped"), "the job stops", timeout_s=120)
    assert_nothing_left(head, family)
    wait_until(lambda: not shared_memory(list(family)), "shared memory is given back", timeout_s=120)
