"""Runs with a rank on each of two hosts connected by ssh; however they end, they leave nothing on either host."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.hosts import Network
from tests.cluster.launched_run import LaunchOnHosts, assert_nothing_left
from tests.e2e.command import succeed
from tests.e2e.conftest import Job
from tests.e2e.records import metrics

pytestmark = pytest.mark.slow

INTERRUPTED = 130
TWO_RANKS = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1}


def test_two_hosts_train_to_the_end(job: Job, launch: LaunchOnHosts, tmp_path: Path) -> None:
    run = launch([1, 1], *job(**TWO_RANKS, num_rollout=2, run_dir=tmp_path / "run", save=tmp_path / "checkpoints")[1:])
    run.ended(0)
    assert len(metrics(tmp_path / "run")) == 2
    assert (tmp_path / "checkpoints" / "iter_0000002").is_dir()
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)], ids=["ctrl-c", "sigkill"]
)
def test_nothing_stays_behind(
    number: signal.Signals, exit_code: int, job: Job, network: Network, launch: LaunchOnHosts, tmp_path: Path
) -> None:
    run = launch([1, 1], *job(**TWO_RANKS, num_rollout=1000, save_interval=1, run_dir=tmp_path / "run")[1:])
    run.wait_for_steps(2, tmp_path / "run")
    assert any("ray::TrainerRank" in command for command in network.hosts[1].processes().values()), network.hosts[1].processes()
    run.send(number)
    said = run.ended(exit_code)
    assert ("with: fuligo launch --hostfile " in said) == (number == signal.SIGINT)
    run.assert_nothing_left()


def test_a_disk_of_its_own_is_noticed(job: Job, network: Network, launch: LaunchOnHosts, tmp_path: Path) -> None:
    """The directory exists on both hosts."""
    (tmp_path / "run").mkdir()
    subprocess.run(network.hosts[1].command("mount", "-t", "tmpfs", "tmpfs", tmp_path / "run"), check=True)
    run = launch([1, 1], *job(**TWO_RANKS, run_dir=tmp_path / "run")[1:])
    said = run.ended(2)
    assert f"node {network.hosts[1].address} does not see files written to {tmp_path}/run on another node" in said
    run.assert_nothing_left()


@pytest.mark.parametrize("how", ["unplugged", "killed"])
def test_a_lost_host_with_a_rank_ends_the_run_and_it_resumes(
    how: str, job: Job, network: Network, launch: LaunchOnHosts, tmp_path: Path
) -> None:
    flags = {"save_interval": 1, "run_dir": tmp_path / "run"}
    run = launch([1, 1], *job(**TWO_RANKS, **flags, num_rollout=1000)[1:])
    run.wait_for_steps(2, tmp_path / "run")
    other = network.hosts[1]
    if how == "unplugged":
        other.unplug()
    else:
        other.kill()
    said = run.ended(1)
    assert f"trainer rank 1 on {other.address} " in said, said
    assert " during `" in said
    assert "resume with --load" in said
    assert_nothing_left(network.hosts[0])
    other.plug_in()
    assert_nothing_left(other)  # its processes end without a message, too

    done = int((tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    succeed(*job(**flags, num_rollout=done + 1, load=tmp_path / "run" / "checkpoints"))
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(done + 1))
