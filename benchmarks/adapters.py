"""Samples per second of several LoRA runs at once (`fuligo train-many`) compared with the same runs one after another (`fuligo train`).

    python benchmarks/adapters.py [--runs 2 4] [--alone N] [--steps 8] [--rounds 1] [-- FLAGS of fuligo train]

Without further flags: the quickstart's task and model on a CPU, 32 prompts x 8 samples. Response lengths are fixed, with a long tail
(8 tokens plus an exponential part), so that both ways do the same work. The runs differ in rank and seed. Flags
after `--` go to all runs and override those of the job, for example on one GPU:

    python benchmarks/adapters.py --runs 8 -- --hf-checkpoint MODEL --device cuda --rollout-backend embedded

or with SGLang on a second one (`--rollout-backend sglang --lora-sync adapter`).

samples/s excludes the first two steps of each run; "with start" is the time of the whole commands. Each way is the best of its rounds. With
`--alone N` only the first N runs are also run one after another, since each starts an engine; their samples/s stand for those of all.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"
NUM_PROMPTS, SAMPLES_PER_PROMPT = 32, 8
SHORTEST, MEAN, LONGEST = 8, 40, 256
WARM_UP_STEPS = 2


async def generate(args, sample, sampling_params):
    """Generate the fixed number of tokens of the sample (hook of fuligo)."""
    from fuligo.rollout.custom_generate import continue_sample

    tail = np.random.default_rng(sample.index).exponential(MEAN - SHORTEST)
    return await continue_sample(sample, {**sampling_params, "max_new_tokens": min(LONGEST, SHORTEST + int(tail)), "ignore_eos": True})


async def reward(args, sample) -> float:
    """Return a reward that differs within groups and costs nothing (hook of fuligo)."""
    return int(sum(sample.response_ids)) % 7 / 7


@dataclass(frozen=True)
class Figures:
    """Throughput of a number of runs."""

    samples_per_s: float
    seconds: float
    """Time of the commands, with start and end."""
    cpu_seconds: float
    """CPU time of all their processes, which does not depend on what else the machine does."""


def timed_steps(run_dir: Path) -> list[dict]:
    """Return the records of a run from the last step of the warm-up on."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return records[WARM_UP_STEPS - 1 :]


def num_samples(records: Sequence[dict]) -> float:
    return sum(record["rollout/num_groups_kept"] for record in records[1:]) * SAMPLES_PER_PROMPT


def cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_configs(number: int, options: argparse.Namespace, directory: Path) -> list[Path]:
    """Write the configs of the runs, which write to directories next to them."""
    from fuligo.config.command_line import parse
    from fuligo.config.files import save_yaml

    directory.mkdir()
    files = []
    for index in range(number):
        flags = f"""
            --hf-checkpoint {ASSETS / "model"} --prompt-data {ASSETS / "train.jsonl"} --input-key prompt --apply-chat-template
            --rollout-shuffle --rollout-batch-size {NUM_PROMPTS} --n-samples-per-prompt {SAMPLES_PER_PROMPT}
            --rollout-max-response-len {LONGEST} --rollout-concurrency 4096
            --custom-generate-function-path {__file__}:generate --custom-rm-path {__file__}:reward
            --num-rollout {options.steps + WARM_UP_STEPS} --use-dynamic-batch-size --max-tokens-per-gpu 16384 --lr 1e-5
            --lora-rank {8 << index % 3} --seed {index} --rollout-seed {index} --progress none
        """.split()
        flags += options.flags or ["--device", "cpu"]
        files.append(directory / f"{index}.yaml")
        save_yaml(parse([*flags, "--run-dir", str(directory / str(index))]).config, files[-1])
    return files


def measured(commands: Sequence[Sequence[str]], run_dirs: Sequence[Path]) -> Figures:
    """Run commands one after the other; return the throughput of their runs, which overlap if there is one command."""
    started, used = time.monotonic(), cpu_seconds()
    for command in commands:
        subprocess.run([sys.executable, "-m", "fuligo", *command], check=True, stdout=subprocess.DEVNULL)
    seconds, used = time.monotonic() - started, cpu_seconds() - used
    steps = [timed_steps(run_dir) for run_dir in run_dirs]
    if len(commands) == 1:
        elapsed_s = max(records[-1]["time"] for records in steps) - min(records[0]["time"] for records in steps)
    else:
        elapsed_s = sum(records[-1]["time"] - records[0]["time"] for records in steps)
    return Figures(sum(map(num_samples, steps)) / elapsed_s, seconds, used)


def compare(number: int, options: argparse.Namespace, directory: Path) -> tuple[Figures, Figures]:
    """Return the figures of the runs one after another and at once."""
    directory.mkdir()
    alone = write_configs(min(number, options.alone or number), options, directory / "alone")
    together = write_configs(number, options, directory / "together")
    run_dirs = [[file.with_suffix("") for file in files] for files in (alone, together)]
    one_by_one = measured([["train", "--config", str(file)] for file in alone], run_dirs[0])
    at_once = measured([["train-many", *map(str, together)]], run_dirs[1])
    return one_by_one, at_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[2, 4], help="numbers of runs to compare")
    parser.add_argument("--alone", type=int, help="number of runs to run one after another; all by default")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each comparison")
    parser.add_argument("flags", nargs="*", help="flags of fuligo train, after --")
    options = parser.parse_args()
    print("      samples per second          with start                  CPU time")
    print("runs  alone together ratio        alone  together ratio       alone  together")
    with tempfile.TemporaryDirectory() as directory:
        for number in options.runs:
            rounds = [compare(number, options, Path(directory) / f"{number}-{each}") for each in range(options.rounds)]
            alone, together = (max(way, key=lambda figures: figures.samples_per_s) for way in zip(*rounds, strict=True))
            print(
                f"{number:4} {alone.samples_per_s:6.1f} {together.samples_per_s:8.1f} {together.samples_per_s / alone.samples_per_s:5.2f} "
                f"{alone.seconds:10.1f} s {together.seconds:7.1f} s {alone.seconds / together.seconds:5.2f} "
                f"{alone.cpu_seconds:9.1f} s {together.cpu_seconds:7.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
