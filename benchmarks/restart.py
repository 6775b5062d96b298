"""Seconds from the loss of a trainer rank to the next step: with --max-restarts, and with a fresh start of the command.

    python benchmarks/restart.py [--rank 1] [--rounds 3] [-- FLAGS of fuligo train]

Each round runs the quickstart's task and model on a CPU, with two trainer ranks and a checkpoint after every second rollout, and kills a
rank after its fourth step. Then a new process resumes the same checkpoint. Both times end when the first step after that checkpoint is
recorded; the first begins with the kill, the second with the start of the process. Flags after `--` go to `fuligo train`, for example

    python benchmarks/restart.py -- --rollout-backend sglang --engine-python .venv-sglang/bin/python
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"
NUM_STEPS = 4
"""Steps before the loss; all of them are in the checkpoint."""
DEADLINE_S = 600.0


def command(run_dir: Path, flags: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "fuligo", "train", "--config", str(ASSETS / "config.yaml"), "--hf-checkpoint", str(ASSETS / "model")),
        *("--eval-prompt-data", str(ASSETS / "test.jsonl"), "--skip-eval-before-train"),
        *("--prompt-data", str(ASSETS / "train.jsonl"), "--actor-num-gpus-per-node", "2", "--rollout-batch-size", "8"),
        *("--save-interval", "2", "--max-restarts", "1", "--num-rollout", "1000", "--run-dir", str(run_dir), "--progress", "plain", *flags),
    ]


@contextmanager
def running(arguments: list[str], log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def times(run_dir: Path) -> list[float]:
    """Return the times at which recorded steps were complete, in seconds since 1970."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line)["time"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(run_dir: Path, log: Path, process: psutil.Process, *, num_steps: int = 1, after: float = 0.0) -> float:
    """Wait until `num_steps` steps have been recorded since the time `after`; return the time of the last of them."""
    deadline = time.time() + DEADLINE_S
    while len(done := [when for when in times(run_dir) if when > after]) < num_steps:
        if time.time() > deadline or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            sys.exit(f"no further step was recorded; output of fuligo train:\n{log.read_text()}")
        time.sleep(0.02)
    return done[num_steps - 1]


def rank_process(driver: psutil.Process, rank: int) -> psutil.Process:
    """Return the process of a rank: a child of the driver, or an actor of Ray."""
    children = [
        child for child in driver.children(recursive=True) if "TrainerRank" in child.name() or "rank_process" in " ".join(child.cmdline())
    ]
    own = [child for child in children if f"--rank {rank} " in " ".join(child.cmdline())]
    return (own or children[-1:])[0]


def round_trip(directory: Path, rank: int, flags: list[str]) -> tuple[float, float]:
    """Return the seconds from the loss of a rank to the next step, with a restart and with a fresh start."""
    run_dir, log = directory / "run", directory / "run.log"
    with running(command(run_dir, flags), log) as driver:
        wait_for_step(run_dir, log, driver, num_steps=NUM_STEPS)
        while not (run_dir / "checkpoints" / f"iter_{NUM_STEPS:07d}").exists():
            time.sleep(0.01)
        lost_at = time.time()
        rank_process(driver, rank).kill()
        while "restarting the trainer" not in log.read_text():
            time.sleep(0.01)
        restart_s = wait_for_step(run_dir, log, driver, after=time.time()) - lost_at
    again, log = directory / "again", directory / "again.log"
    started_at = time.time()
    load = ["--load", str(run_dir / "checkpoints"), "--ckpt-step", str(NUM_STEPS)]
    with running(command(again, [*flags, *load]), log) as driver:
        start_s = wait_for_step(again, log, driver) - started_at
    return restart_s, start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=1, help="rank to kill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", metavar="FLAGS")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            restart_s, start_s = round_trip(Path(directory), options.rank, options.flags)
        print(f"round {number + 1}: restart {restart_s:.1f} s, fresh start {start_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
