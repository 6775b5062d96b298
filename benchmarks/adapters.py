"""Samples per second of several LoRA runs at once (`fuligo train-many`) compared with the same runs one after another (`fuligo train`).

    python benchmarks/adapters.py [--runs 2 4] [--alone N] [--steps 8] [--rounds 1] [--directory DIR] [-- FLAGS of fuligo train]

Without further flags: the quickstart's task and model on a CPU, 32 prompts x 8 samples. Response lengths are fixed, with a long tail
(8 tokens plus an exponential part), so that both ways do the same work. The runs differ in rank and seed. Flags after `--` go to all runs
and override those of the job, for example on one GPU:

    python benchmarks/adapters.py --runs 8 -- --hf-checkpoint MODEL --device cuda --rollout-backend embedded

or with SGLang on a second GPU (`--rollout-backend sglang --lora-sync adapter`).

samples/s excludes the first two steps of each run. For runs at once, it counts the steps between the time at which every run has made its
first two steps and the end of the first run: no run compiles then, and all of them work. "with start" is the total time of the commands.
Each row shows the best of its rounds. With `--alone N` only the first N runs are also run alone, since each starts an engine; their figures
are scaled to all runs. Below each row are the medians of the parts of a step in seconds; with runs at once they include waiting for other
runs. `--directory` keeps the runs.
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"
NUM_PROMPTS, SAMPLES_PER_PROMPT = 32, 8
SHORTEST, MEAN, LONGEST = 8, 40, 256
WARM_UP_STEPS = 2
PARTS = ("rollout", "score", "train", "sync", "step")


async def generate(args, sample, sampling_params):
    """Generate the number of tokens that is fixed for the sample (`--custom-generate-function-path`)."""
    from fuligo.rollout.custom_generate import continue_sample

    tail = np.random.default_rng(sample.index).exponential(MEAN - SHORTEST)
    return await continue_sample(sample, {**sampling_params, "max_new_tokens": min(LONGEST, SHORTEST + int(tail)), "ignore_eos": True})


async def reward(args, sample) -> float:
    """Return a reward that differs within groups and costs nothing (`--custom-rm-path`)."""
    return int(sum(sample.response_ids)) % 7 / 7


@dataclass(frozen=True)
class Figures:
    """Throughput and cost of a number of runs."""

    samples_per_s: float
    seconds: float
    """Wall time of the commands, including start and end."""
    cpu_seconds: float
    """CPU time of all their processes, which depends little on other work on the machine."""
    parts: dict[str, float]
    """Median seconds of the parts of a step."""

    def times(self, factor: float) -> Figures:
        """Return the figures of `factor` times as many runs, one after another."""
        return replace(self, seconds=self.seconds * factor, cpu_seconds=self.cpu_seconds * factor)


def read_steps(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def samples_per_s(runs: Sequence[Sequence[dict]], *, at_once: bool) -> float:
    """Return the samples per second of runs after the warm-up, given the records of their steps."""
    begins = [steps[WARM_UP_STEPS - 1]["time"] for steps in runs]
    ends = [steps[-1]["time"] for steps in runs]
    if at_once:
        begins, ends = [max(begins)] * len(runs), [min(ends)] * len(runs)
        if ends[0] <= begins[0]:
            raise SystemExit("cannot measure runs at once: one ended before all had made their first two steps; increase --steps")
        elapsed_s = ends[0] - begins[0]
    else:
        elapsed_s = sum(end - begin for begin, end in zip(begins, ends, strict=True))
    timed = [step for begin, end, steps in zip(begins, ends, runs, strict=True) for step in steps if begin < step["time"] <= end]
    return sum(step["rollout/num_groups_kept"] for step in timed) * SAMPLES_PER_PROMPT / elapsed_s


def cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended and of their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_configs(number: int, options: argparse.Namespace, directory: Path) -> list[Path]:
    """Write a config for each run; the run directories are next to the files."""
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
    """Run commands one after the other; return the figures of their runs, which overlap if one command starts several."""
    started, used = time.monotonic(), cpu_seconds()
    for command in commands:
        subprocess.run([sys.executable, "-m", "fuligo", *command], check=True, stdout=subprocess.DEVNULL)
    seconds, used = time.monotonic() - started, cpu_seconds() - used
    runs = [read_steps(run_dir) for run_dir in run_dirs]
    later = [step for steps in runs for step in steps[WARM_UP_STEPS:]]
    parts = {part: median(step.get(f"perf/{part}_s", 0.0) for step in later) for part in PARTS}
    return Figures(samples_per_s(runs, at_once=len(commands) == 1 < len(runs)), seconds, used, parts)


def compare(number: int, options: argparse.Namespace, directory: Path) -> tuple[Figures, Figures]:
    """Return the figures of the runs one after another and at once."""
    directory.mkdir()
    alone = write_configs(min(number, options.alone or number), options, directory / "alone")
    together = write_configs(number, options, directory / "together")
    run_dirs = [[file.with_suffix("") for file in files] for files in (alone, together)]
    one_by_one = measured([["train", "--config", str(file)] for file in alone], run_dirs[0]).times(number / len(alone))
    at_once = measured([["train-many", *map(str, together)]], run_dirs[1])
    return one_by_one, at_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[2, 4], help="numbers of runs to compare")
    parser.add_argument("--alone", type=int, help="number of runs to run one after another; all by default")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each comparison")
    parser.add_argument("flags", nargs="*", help="flags of fuligo train, after --")
    parser.add_argument("--directory", type=Path, help="new directory for the runs (default: a temporary one)")
    options = parser.parse_args()
    if options.directory is None:
        with tempfile.TemporaryDirectory() as directory:
            compare_all(options, Path(directory))
    else:
        options.directory.mkdir(parents=True)
        compare_all(options, options.directory)


def compare_all(options: argparse.Namespace, directory: Path) -> None:
    """Print a row for each number of runs."""
    print("      samples per second          with start                  CPU time")
    print("runs  alone together ratio        alone  together ratio       alone  together")
    for number in options.runs:
        rounds = [compare(number, options, directory / f"{number}-{each}") for each in range(options.rounds)]
        alone, together = (max(way, key=lambda figures: figures.samples_per_s) for way in zip(*rounds, strict=True))
        print(
            f"{number:4} {alone.samples_per_s:6.1f} {together.samples_per_s:8.1f} {together.samples_per_s / alone.samples_per_s:5.2f} "
            f"{alone.seconds:10.1f} s {together.seconds:7.1f} s {alone.seconds / together.seconds:5.2f} "
            f"{alone.cpu_seconds:9.1f} s {together.cpu_seconds:7.1f} s"
        )
        for name, figures in (("alone", alone), ("together", together)):
            print(f"     {name:8}", *(f"{part} {seconds:.2f}" for part, seconds in figures.parts.items()), flush=True)


if __name__ == "__main__":
    main()
