"""Faults that can strike a run of one host."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuligo.formats.checkpoint_files import TRACKER
from tests.chaos.machine import Machine
from tests.e2e.processes import descendants
from tests.e2e.records import checkpoint

RANK, STANDBY, ENGINE = "trainer rank", "standby", " serve "
_RANK_COMMAND = re.compile(r"trainer\.ranks\.rank_process --rank (\d+) ")
SECONDS = (0.5, 4.0)
"""Bounds of the time for which something is stopped, slow, or lost."""
DAY_S = 24 * 3600
Outcome = Literal["ends", "continues", "either"]


@dataclass(slots=True, frozen=True)
class Run:
    """Run that faults strike."""

    driver: subprocess.Popen[bytes]
    log: Path
    """File with the run's output."""
    machine: Machine
    run_dir: Path
    prompts: Path
    random: random.Random

    def seconds(self) -> float:
        return self.random.uniform(*SECONDS)

    def process(self, part: str) -> int | None:
        """Return a process of the run: one of its trainer ranks or standby ranks, or the engine; None if there is none."""
        found = descendants(self.driver.pid)
        if part == ENGINE:
            pids = [pid for pid, command in found.items() if part in command]
        else:
            ranks = [(int(match[1]), pid) for pid, command in found.items() if (match := _RANK_COMMAND.search(command))]
            # A standby is started after the rank whose place it may take.
            first = {pid for number, pid in ranks if pid == min(other for its, other in ranks if its == number)}
            pids = [pid for _, pid in ranks if (pid in first) == (part == RANK)]
        return self.random.choice(pids) if pids else None

    @staticmethod
    def send(pid: int | None, number: signal.Signals) -> None:
        """Send a signal to a process, if it still runs."""
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def link(self, state: Literal["up", "down"]) -> None:
        """Set the run's loopback interface."""
        command = ["nsenter", "--net", f"--target={self.driver.pid}", "ip", "link", "set", "lo", state]
        with suppress(subprocess.CalledProcessError):  # the run, and with it its namespace, has ended
            subprocess.run(command, check=True, capture_output=True)

    def num_saved(self) -> int:
        """Return the number of rollouts in the newest checkpoint."""
        return int((self.run_dir / "checkpoints" / TRACKER).read_text())

    def newest_checkpoint(self) -> Path:
        return checkpoint(self.run_dir, self.num_saved())


@dataclass(slots=True, frozen=True)
class Fault:
    """Kind of fault."""

    name: str
    strike: Callable[[Run], None]
    outcome: Outcome
    """Required outcome of the run."""
    says: str = ""
    """Regular expression that is found in the output of a run that it ended."""
    repair: Callable[[Run], None] = lambda run: None
    """Remove the cause before the run is resumed."""
    refused: str = ""
    """Regular expression that is found in the output of a resume, which is refused; then the run resumes from the checkpoint before."""
    is_slow: bool = False
    """Its outcome takes tens of seconds."""
    restarts: bool = False
    """A run with --max-restarts replaces the trainer and continues."""

    def outcome_in(self, *, restarts: bool) -> Outcome:
        """Return the required outcome for a run with or without --max-restarts."""
        return "continues" if restarts and self.restarts else self.outcome

    def frequency(self, *, restarts: bool) -> float:
        """Return the relative frequency in a draw: less where the run must be resumed, or waits for a deadline."""
        return 0.5 if self.is_slow else 1.0 if self.outcome_in(restarts=restarts) == "ends" else 4.0


def _kill(part: str) -> Callable[[Run], None]:
    return lambda run: run.send(run.process(part), signal.SIGKILL)


def _stop(part: str) -> Callable[[Run], None]:
    return lambda run: run.send(run.process(part), signal.SIGSTOP)


def _pause(part: str) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        pid = run.process(part)
        run.send(pid, signal.SIGSTOP)
        time.sleep(run.seconds())
        run.send(pid, signal.SIGCONT)

    return strike


def _slow(part: str) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        end, pid = time.monotonic() + run.seconds(), run.process(part)
        while time.monotonic() < end:
            run.send(pid, signal.SIGSTOP)
            time.sleep(0.18)
            run.send(pid, signal.SIGCONT)
            time.sleep(0.02)

    return strike


def _pause_driver(run: Run) -> None:
    run.driver.send_signal(signal.SIGSTOP)
    time.sleep(run.seconds())
    run.driver.send_signal(signal.SIGCONT)


def _lose_network(run: Run) -> None:
    run.link("down")
    time.sleep(run.seconds())
    run.link("up")


def _fill_disk(run: Run) -> None:
    run.machine.disk.fill()


def _fill_disk_for_seconds(run: Run) -> None:
    run.machine.disk.fill()
    time.sleep(run.seconds())
    run.machine.disk.free()


def _fill_memory_for_seconds(run: Run) -> None:
    run.machine.memory.fill()
    time.sleep(run.seconds())
    run.machine.memory.free()


def _step_clock(sign: int) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        run.machine.step_clock(sign * run.random.randrange(60, 400 * DAY_S))

    return strike


def _truncate_prompts(run: Run) -> None:
    shutil.copy(run.prompts, run.prompts.with_suffix(".intact"))
    os.truncate(run.prompts, run.random.randrange(run.prompts.stat().st_size))


def _restore_prompts(run: Run) -> None:
    run.prompts.with_suffix(".intact").replace(run.prompts)


def _kill_and_damage(damage: Callable[[Run, Path], None]) -> Callable[[Run], None]:
    """Kill the run and damage a file of its newest checkpoint."""

    def strike(run: Run) -> None:
        run.driver.kill()
        run.driver.wait()
        files = [path for path in sorted(run.newest_checkpoint().rglob("*")) if path.is_file() and path.stat().st_size]
        damage(run, run.random.choice(files))

    return strike


def _flip_bit(run: Run, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[run.random.randrange(len(content))] ^= 1 << run.random.randrange(8)
    file.write_bytes(content)


def _kill_and_tear_records(run: Run) -> None:
    """Kill the run and leave behind what a power cut may leave: half a record, a half-written file of samples, an unfinished checkpoint."""
    run.driver.kill()
    run.driver.wait()
    with (run.run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "train/loss": 0.1\x00\x00')
    newest = max((run.run_dir / "samples").glob("rollout_*.parquet"))
    number = int(newest.stem.removeprefix("rollout_")) + 1
    (newest.parent / f"rollout_{number:06d}.parquet").write_bytes(newest.read_bytes()[: run.random.randrange(newest.stat().st_size)])
    unfinished = run.run_dir / "checkpoints" / ".tmp_iter_0000099"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "state.json").write_bytes(b"{")


_DAMAGED = r"cannot (load|read|resume)"
_DEAD_ENGINE = r"engine http\S+ .*(ended|died|killed|exit code|no answer)|exit code -9"
DRIVER_KILLED = Fault("driver killed", lambda run: run.driver.kill(), "ends")
RANK_STOPPED = Fault("trainer rank stopped for seconds", _pause(RANK), "continues")
NETWORK_LOST = Fault("network lost for seconds", _lose_network, "either", says=r"engine|rank")
RANK_KILLED = Fault("trainer rank killed", _kill(RANK), "ends", says=r"rank 1\b", restarts=True)
STANDBY_KILLED = Fault("standby rank killed", _kill(STANDBY), "continues")
"""Only runs with --max-restarts have standby ranks."""
FAULTS = [
    DRIVER_KILLED,
    RANK_STOPPED,
    NETWORK_LOST,
    Fault("SIGTERM to the driver", lambda run: run.driver.terminate(), "ends", says="resume"),
    Fault("Ctrl-C", lambda run: run.driver.send_signal(signal.SIGINT), "ends", says="resume"),
    Fault("driver stopped for seconds", _pause_driver, "continues"),
    Fault("trainer rank slow", _slow(RANK), "continues"),
    RANK_KILLED,
    Fault("trainer rank stopped for good", _stop(RANK), "ends", says=r"rank 1 .* not answered", is_slow=True, restarts=True),
    Fault("engine stopped for seconds", _pause(ENGINE), "continues"),
    Fault("engine slow", _slow(ENGINE), "continues"),
    Fault("engine killed", _kill(ENGINE), "ends", says=_DEAD_ENGINE),
    Fault("engine stopped for good", _stop(ENGINE), "ends", says=r"engine http\S+", is_slow=True),
    Fault("disk full", _fill_disk, "ends", says="free", repair=lambda run: run.machine.disk.free()),
    Fault("disk full for seconds", _fill_disk_for_seconds, "either", says="free"),
    Fault("/dev/shm full for seconds", _fill_memory_for_seconds, "either", says="/dev/shm|memory"),
    Fault("clock stepped forward", _step_clock(1), "continues"),
    Fault("clock stepped back", _step_clock(-1), "continues"),
    Fault("prompt file truncated", _truncate_prompts, "ends", says="content changed", repair=_restore_prompts),
    Fault("killed, and a bit of the newest checkpoint flipped", _kill_and_damage(_flip_bit), "ends", refused=_DAMAGED),
    Fault(
        "killed, and a file of the newest checkpoint truncated",
        _kill_and_damage(lambda run, file: os.truncate(file, run.random.randrange(file.stat().st_size))),
        "ends",
        refused=_DAMAGED,
    ),
    Fault(
        "killed, and a file of the newest checkpoint deleted",
        _kill_and_damage(lambda run, file: file.unlink()),
        "ends",
        refused=_DAMAGED,
    ),
    Fault("killed, and records torn", _kill_and_tear_records, "ends"),
]
