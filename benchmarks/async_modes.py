"""Samples per second and idle time of trainer and engines in the three modes of `--async-mode`, which run the same job alternately.

    python benchmarks/async_modes.py [--steps 16] [--rounds 2] [--max-staleness 2] [--mean 40] [--longest 256] [-- FLAGS of fuligo train]

Without further flags: 32 prompts x 8 samples of the quickstart's task and model on a CPU, one thread for the engine and one for the
trainer. Response lengths are fixed, with a long tail (8 tokens plus an exponential part), so that every mode does the same work. Choose
--mean and --longest so that sampling and training take about equally long (the output shows both, measured in sync mode), because sampling
ahead then gains most. Flags after `--` go to `fuligo train` and override those of the job, for example on GPUs:

    python benchmarks/async_modes.py -- --hf-checkpoint MODEL --device cuda --rollout-backend sglang --rollout-num-gpus 1

All figures exclude the first four steps. samples/s is the best of the rounds; idle shares are those of that round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"
NUM_PROMPTS, SAMPLES_PER_PROMPT = 32, 8
SHORTEST = 8
WARM_UP_STEPS = 4
LENGTHS_VARIABLE = "ASYNC_BENCHMARK_LENGTHS"


async def generate(args, sample, sampling_params):
    """Generate the number of tokens that is fixed for the sample (`--custom-generate-function-path`)."""
    from fuligo.rollout.custom_generate import continue_sample

    mean, longest = map(int, os.environ[LENGTHS_VARIABLE].split())
    tail = np.random.default_rng(sample.index).exponential(mean - SHORTEST)
    return await continue_sample(sample, {**sampling_params, "max_new_tokens": min(longest, SHORTEST + int(tail)), "ignore_eos": True})


async def reward(args, sample) -> float:
    """Return a reward that differs within groups and costs nothing (`--custom-rm-path`)."""
    return int(sum(sample.response_ids)) % 7 / 7


@dataclass(frozen=True)
class Figures:
    """Results of one run, over the steps after the warm-up."""

    samples_per_s: float
    trainer_idle: float
    engine_idle: float
    staleness: float
    rollout_s: float
    train_s: float

    @classmethod
    def of(cls, run_dir: Path) -> Figures:
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        start, timed = records[WARM_UP_STEPS - 1], records[WARM_UP_STEPS:]
        num_samples = sum(record["rollout/num_groups_kept"] for record in timed) * SAMPLES_PER_PROMPT
        elapsed_s = timed[-1]["time"] - start["time"]

        def mean(key: str) -> float:
            return statistics.mean(record[key] for record in timed)

        return cls(
            num_samples / elapsed_s,
            *map(mean, ("perf/idle_fraction", "perf/engine_idle_fraction", "rollout/staleness", "perf/rollout_s", "perf/train_s")),
        )


def run(mode: str, options: argparse.Namespace, run_dir: Path) -> Figures:
    num_steps = options.steps + WARM_UP_STEPS
    command = [sys.executable, "-m", "fuligo", "train", "--run-dir", str(run_dir), "--num-rollout", str(num_steps), "--async-mode", mode]
    command += ["--max-staleness", str(options.max_staleness)] if mode == "full" else []
    command += f"""
        --hf-checkpoint {ASSETS / "model"} --prompt-data {ASSETS / "train.jsonl"} --input-key prompt --apply-chat-template
        --rollout-batch-size {NUM_PROMPTS} --n-samples-per-prompt {SAMPLES_PER_PROMPT} --rollout-max-response-len {options.longest}
        --rollout-concurrency 4096 --custom-generate-function-path {__file__}:generate --custom-rm-path {__file__}:reward
        --num-steps-per-rollout 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384 --lr 1e-6 --use-tis --progress none
    """.split()
    command += options.flags or ["--device", "cpu", "--embedded-num-threads", "1"]
    environment = {**os.environ, LENGTHS_VARIABLE: f"{options.mean} {options.longest}"}
    if not options.flags:
        environment["OMP_NUM_THREADS"] = "1"
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return Figures.of(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="timed steps of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode")
    parser.add_argument("--max-staleness", type=int, default=2, help="staleness bound of the full mode")
    parser.add_argument("--mean", type=int, default=40, help="mean response length in tokens, before clipping to --longest")
    parser.add_argument("--longest", type=int, default=256, help="longest response in tokens")
    parser.add_argument("flags", nargs="*", help="flags of fuligo train, after --")
    options = parser.parse_args()
    best: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            for mode in ("sync", "one-step", "full"):
                figures = run(mode, options, Path(directory) / f"{mode}-{number}")
                best[mode] = max(figures, best.get(mode, figures), key=lambda known: known.samples_per_s)
    sync = best["sync"]
    print(f"in sync mode a step samples for {sync.rollout_s:.2f} s and trains for {sync.train_s:.2f} s")
    print(f"{'mode':9} {'samples/s':>9} {'x sync':>6} {'trainer idle':>12} {'engine idle':>11} {'staleness':>9}")
    for mode, figures in best.items():
        ratio = figures.samples_per_s / sync.samples_per_s
        print(
            f"{mode:9} {figures.samples_per_s:9.1f} {ratio:6.2f} {figures.trainer_idle:12.0%} {figures.engine_idle:11.0%} "
            f"{figures.staleness:9.2f}"
        )


if __name__ == "__main__":
    main()
