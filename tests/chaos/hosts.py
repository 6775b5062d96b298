"""Campaign against a run on three hosts: namespaces of this machine that only a network connects (tests/cluster/hosts.py)."""

import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.campaign import NAMED_WITHIN_S, NUM_SAMPLES, RESTARTED_WITHIN_S, Strike
from tests.chaos.faults import SECONDS
from tests.cluster.hosts import Host, Network, network_of
from tests.cluster.launched_run import LaunchedRun
from tests.e2e.command import train_command
from tests.e2e.processes import wait_until
from tests.e2e.records import assert_every_prompt_is_accounted_for, metrics

NUM_HOSTS = 3
NUM_ROLLOUTS = 24
START_TIMEOUT_S = 600.0
STEPS_AFTER = 2
"""Further steps after which a fault has had its effect."""


@dataclass(slots=True, frozen=True)
class HostsRun:
    """Run on hosts that faults strike; its driver is on the first one."""

    launched: LaunchedRun
    hosts: list[Host]
    random: random.Random

    def other(self) -> Host:
        """Draw a host without the driver."""
        return self.random.choice(self.hosts[1:])


@dataclass(slots=True, frozen=True)
class HostFault:
    """Kind of fault of a host or its network."""

    name: str
    strike: Callable[[HostsRun], None]
    exit_code: int | None
    """Required exit code of the run; None: it continues."""
    says: str = ""
    """Regular expression that is found in the output of a run that it ended."""


def _unplug_for_seconds(run: HostsRun) -> None:
    host = run.other()
    host.unplug()
    time.sleep(run.random.uniform(*SECONDS))
    host.plug_in()


_LOST_RANK = r"trainer rank [12] on "
HOST_FAULTS = [
    HostFault("host unplugged for seconds", _unplug_for_seconds, None),
    HostFault("trainer rank of a host killed", lambda run: run.other().kill("ray::TrainerRank"), None),
    HostFault("host unplugged for good", lambda run: run.other().unplug(), 1, _LOST_RANK),
    HostFault("host killed", lambda run: run.other().kill(), 1, _LOST_RANK),
    HostFault("launched driver killed", lambda run: run.launched.send(signal.SIGKILL), -signal.SIGKILL),
    HostFault("SIGTERM to the launched driver", lambda run: run.launched.send(signal.SIGTERM), 130, "resume"),
]


@dataclass(slots=True)
class HostsCampaign:
    """Run of three ranks on three hosts, with restarts, resumed after each fault that ends it."""

    network: Network
    checkpoint: Path
    prompts: Path
    directory: Path
    random: random.Random
    record: Callable[[Strike], None] = lambda strike: None
    strikes: list[Strike] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def survive(self, faults: Iterator[HostFault]) -> None:
        """Run to the end, struck by these faults.

        Raises:
            AssertionError: a fault did not have its required outcome, or something was left behind
        """
        ended = True
        while ended:
            with self._launched() as run:
                ended = self._strike_until_end(run, faults)
                if not ended:
                    run.launched.ended(0, timeout_s=START_TIMEOUT_S)
                for host in self.network.hosts:
                    host.plug_in()
                run.launched.assert_nothing_left()
        assert [record["step"] for record in metrics(self.run_dir)] == list(range(NUM_ROLLOUTS))
        texts = [json.loads(line)["prompt"][0]["content"] for line in self.prompts.read_text().splitlines()]
        assert_every_prompt_is_accounted_for(self.run_dir, texts, num_rollouts=NUM_ROLLOUTS, num_samples=NUM_SAMPLES)

    def _strike_until_end(self, run: HostsRun, faults: Iterator[HostFault]) -> bool:
        """Strike at random moments; return True if a fault ended the run."""
        while True:
            self._wait_for_steps(run, max(2, self._num_steps() + 1), START_TIMEOUT_S)
            time.sleep(self.random.random() * 0.3)
            is_over = self._num_steps() >= NUM_ROLLOUTS - STEPS_AFTER - 1 or run.launched.process.poll() is not None
            fault = None if is_over else next(faults, None)
            if fault is None:
                return False
            self._strike(run, fault)
            if fault.exit_code is not None:
                return True

    def _strike(self, run: HostsRun, fault: HostFault) -> None:
        """Strike and wait for the outcome."""
        num_steps, struck = self._num_steps(), time.monotonic()
        fault.strike(run)
        said = ""
        if fault.exit_code is None:
            self._wait_for_steps(run, num_steps + STEPS_AFTER + 1, RESTARTED_WITHIN_S)
            assert run.launched.process.poll() in (None, 0), f"{fault.name} ended the run: {run.launched.process.communicate()[0][-3000:]}"
        else:
            said = run.launched.ended(fault.exit_code, timeout_s=RESTARTED_WITHIN_S)
            assert re.search(fault.says, said), f"{fault.name}: not named: {said[-3000:]}"
        seconds = time.monotonic() - struck
        self.strikes.append(Strike(fault.name, fault.exit_code is not None, seconds, said[-300:]))
        self.record(self.strikes[-1])
        limit_s = RESTARTED_WITHIN_S if fault.exit_code is None else NAMED_WITHIN_S
        assert seconds <= limit_s, f"{fault.name}: {seconds:.0f} s: {said[-1000:]}"

    def _num_steps(self) -> int:
        """Return the number of whole records."""
        file = self.run_dir / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _wait_for_steps(self, run: HostsRun, num_steps: int, timeout_s: float) -> None:
        """Wait until these many steps are recorded, or the run has ended."""
        wait_until(lambda: self._num_steps() >= num_steps or run.launched.process.poll() is not None, f"{num_steps} steps", timeout_s)

    @contextmanager
    def _launched(self) -> Iterator[HostsRun]:
        """Start or resume the run; kill what is left of it at the end of the block."""
        flags = {
            "rm_type": None,
            "custom_rm_path": "tests.e2e.killers.reward",
            "rollout_batch_size": 6,
            "n_samples_per_prompt": NUM_SAMPLES,
            "num_rollout": NUM_ROLLOUTS,
            "actor_num_nodes": NUM_HOSTS,
            "actor_num_gpus_per_node": 1,
            "check_weight_update_equal": True,
            "save_interval": 1,
            "save_on_sigterm": 60,
            "max_restarts": 1000,
            "run_dir": self.run_dir,
            "load": self.run_dir / "checkpoints",
        }
        train = train_command(self.checkpoint, self.prompts, **flags)[1:]
        hosts = list(self.network.hosts)
        launched = LaunchedRun(hosts, [1] * NUM_HOSTS, self.directory / "hostfile", self.network.ssh_config, train)
        try:
            yield HostsRun(launched, hosts, self.random)
        finally:
            for host in hosts:
                host.plug_in()
                host.kill()
            launched.process.wait()


@contextmanager
def hosts_campaign(
    directory: Path, checkpoint: Path, prompts: Path, draw: random.Random, record: Callable[[Strike], None]
) -> Iterator[HostsCampaign]:
    """Start three hosts and return the campaign against a run on them."""
    keys = directory / "network"
    keys.mkdir()
    with network_of(NUM_HOSTS, keys) as network:
        yield HostsCampaign(network, checkpoint, prompts, directory, draw, record)
