"""Runs on hosts connected only by ssh, and checks that they leave nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fuligo.cli.launch import SSH
from tests.cluster.hosts import Host
from tests.e2e.command import environment
from tests.e2e.processes import descendants, interrupt, wait_until
from tests.e2e.records import metrics

LaunchOnHosts = Callable[..., "LaunchedRun"]


class LaunchedRun:
    """`fuligo launch` on the first host, with arguments of `fuligo train`.

    Args:
        slots: slots of each host.
    """

    def __init__(self, hosts: Sequence[Host], slots: Sequence[int], hostfile: Path, ssh_config: Path, train: Sequence[object]) -> None:
        hostfile.write_text("".join(f"{host.name} slots={number}\n" for host, number in zip(hosts, slots, strict=True)))
        ssh = SSH.replace("ssh", f"ssh -F {ssh_config}", 1)
        command = [sys.executable, "-m", "fuligo", "launch", "--hostfile", hostfile, "--ssh", ssh, "--", *train]
        self._hosts = hosts
        with interrupt():
            self.process = subprocess.Popen(
                hosts[0].command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
            )

    def wait_for_steps(self, num_steps: int, run_dir: Path, timeout_s: float = 240.0) -> None:
        wait_until(lambda: len(metrics(run_dir)) >= num_steps or self.process.poll() is not None, f"{num_steps} steps", timeout_s)
        assert self.process.poll() is None, self.process.communicate()[0]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the driver."""
        [driver] = (pid for pid, command in descendants(self.process.pid).items() if " -m fuligo launch --hostfile" in command)
        os.kill(driver, number)

    def ended(self, exit_code: int, timeout_s: float = 240.0) -> str:
        """Wait for its end; return its output on one line."""
        said, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == exit_code, f"exit code {self.process.returncode}: {said}"
        assert "Traceback" not in said, said
        return " ".join(said.split())

    def assert_nothing_left(self) -> None:
        for host in self._hosts:
            assert_nothing_left(host)


def assert_nothing_left(host: Host) -> None:
    wait_until(lambda: not host.processes(), f"all processes on {host.name} have ended", timeout_s=120)
    left = {"shared memory": host.shared_memory(), "ports": host.ports()}
    assert not any(left.values()), f"{host.name}: {left}"
