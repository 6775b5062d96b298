"""Faults that can strike a run of one host."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.e2e.processes import descendants
from tests.small_disk import SmallDisk

RANK = "trainer.ranks.rank"
SLOW_S = (0.5, 4.0)
"""Bounds of the time for which a process or the network is stopped."""


@dataclass(slots=True, frozen=True)
class Run:
    """Run that faults strike."""

    driver: subprocess.Popen[bytes]
    """Driver, in a network namespace of its own."""
    log: Path
    """File with the run's output."""
    disk: SmallDisk
    """File system of the run directory."""
    random: random.Random

    def signal(self, part: str, number: signal.Signals) -> None:
        """Send a signal to the last process of the process tree whose command has this part."""
        pids = [pid for pid, command in descendants(self.driver.pid).items() if part in command]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(pids[-1], number)

    def link(self, state: Literal["up", "down"]) -> None:
        """Set the run's loopback interface."""
        command = ["nsenter", "--net", f"--target={self.driver.pid}", "ip", "link", "set", "lo", state]
        subprocess.run(command, check=True, capture_output=True)


@dataclass(slots=True, frozen=True)
class Fault:
    """Kind of fault."""

    name: str
    strike: Callable[[Run], None]
    outcome: Literal["ends", "continues", "either"]
    """Required outcome of the run."""


def _pause(part: str) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        run.signal(part, signal.SIGSTOP)
        time.sleep(run.random.uniform(*SLOW_S))
        run.signal(part, signal.SIGCONT)

    return strike


def _lose_network(run: Run) -> None:
    run.link("down")
    time.sleep(run.random.uniform(*SLOW_S))
    with suppress(subprocess.CalledProcessError):  # the run, and with it its namespace, has ended
        run.link("up")


FAULTS = [
    Fault("driver killed", lambda run: run.driver.kill(), "ends"),
    Fault("trainer rank stopped for seconds", _pause(RANK), "continues"),
    Fault("network lost for seconds", _lose_network, "either"),
]
