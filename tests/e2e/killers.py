"""Hooks that kill their own process (SIGKILL, or KILL_WITH) at a moment that an environment variable names: `KILL_AT=train:3`."""

import asyncio
import functools
import os
import random
import signal
import threading
import time
from pathlib import Path

from fuligo.types import Sample
from tests.e2e.processes import descendants


def _moment() -> tuple[str, int]:
    where, _, step = os.environ.get("KILL_AT", ":-1").partition(":")
    return where, int(step)


@functools.cache
def _kill() -> None:
    """Send the signal, once: a second Ctrl-C would end a run that saves after the first one."""
    os.kill(os.getpid(), signal.Signals[os.environ.get("KILL_WITH", "SIGKILL")])


async def reward(args, sample: Sample) -> float:
    """Return a function of the tokens as the reward; may kill the process at the second sample of a group, while others are in flight."""
    await asyncio.sleep(0)
    if _moment() == ("rollout", sample.metadata.get("start_rollout_id")) and sample.index % 4 == 1:
        _kill()
    return float(sum(sample.response_ids.tolist()) % 7)


def drop_some(args, samples: list[Sample], **kwargs) -> tuple[bool, str | None]:
    """Drop a third of the groups, always the same ones."""
    dropped = samples[0].group_index % 3 == 1
    return not dropped, "unlucky" if dropped else None


def before_train_step(args, rollout_id: int, batch) -> None:
    """Kill the process some milliseconds into the training step or into the checkpoint after it, if asked to."""
    where, step = _moment()
    if step != rollout_id or where not in ("train", "save"):
        return
    begun = Path(args.run_dir) / "checkpoints"

    def wait_and_kill() -> None:
        if where == "save":
            while not list(begun.glob(".tmp_*")):
                time.sleep(0.0005)
        time.sleep(random.random() * 0.02)
        _kill()

    threading.Thread(target=wait_and_kill, daemon=True).start()


def exit_quietly(args, rollout_id: int, batch) -> None:
    """End the process before the second training step, without an error."""
    if rollout_id == 1:
        os._exit(0)


async def signal_engine(args, sample: Sample) -> float:
    """Send a signal to the engine while other samples are in flight: `SIGNAL_ENGINE=SIGKILL:1` does so in rollout 1."""
    name, _, step = os.environ.get("SIGNAL_ENGINE", ":-1").partition(":")
    if sample.metadata["start_rollout_id"] == int(step):
        for pid, command in descendants(os.getpid()).items():
            if " serve " in command:
                os.kill(pid, signal.Signals[name])
    return float(sample.index % 2)


async def truncate_prompts(args, sample: Sample) -> float:
    """Truncate the prompt file if TRUNCATE_PROMPTS is set."""
    if os.environ.get("TRUNCATE_PROMPTS"):
        os.truncate(args.prompt_data, 1)
    return float(sample.index % 2)


_struck: set[str] = set()
"""Kills of `kill_ranks` that have happened."""


def _start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot (`starttime` of proc_pid_stat(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def kill_ranks(args, rollout_id: int, batch) -> None:
    """Kill trainer ranks during training: `KILL_RANKS="1:3 0:4"` kills rank 1 in rollout 3 and rank 0 in rollout 4, each once.

    Note the engines' processes in the run directory before every step.
    """
    family = descendants(os.getpid())
    engines = [
        pid
        for pid, command in family.items()
        if " serve " in command or ("sglang.launch_server" in command and "engines/guard.py" not in command)
    ]
    with (Path(args.run_dir) / "engines.txt").open("a") as file:
        file.write(f"{rollout_id} {engines}\n")
    for strike in os.environ.get("KILL_RANKS", "").split():
        rank, _, step = strike.partition(":")
        if int(step) == rollout_id and strike not in _struck:
            _struck.add(strike)
            found = [pid for pid, command in family.items() if f"rank_process --rank {rank} " in command or "ray::TrainerRank" in command]
            ranks = sorted(found, key=_start_ticks)  # a standby starts after its rank, but its number may be smaller: they wrap around
            pid = ranks[int(rank)] if "ray::TrainerRank" in family[ranks[0]] else ranks[0]
            threading.Timer(random.random() * 0.02, os.kill, (pid, signal.SIGKILL)).start()


def kill_all_runs(args, rollout_id: int, batch) -> None:
    """Kill the process that all runs of `fuligo train-many` share, in the training step of rollout KILL_ALL_AT."""
    if os.environ.get("KILL_ALL_AT") == str(rollout_id):
        os.kill(os.getppid(), signal.SIGKILL)
