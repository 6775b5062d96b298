"""`fuligo quickstart`: a tiny model learns to add with GRPO on this machine."""

import time

STARTED_S = time.perf_counter()

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "quickstart" / "assets"
NUM_ROWS_SHOWN = 8


def main(arguments: Sequence[str]) -> int:
    """Train, show answers before and after, and end with a line on the reward."""
    options = _options(arguments)
    run_dir = Path(options.run_dir or Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}")

    from fuligo.cli.preflight import preflight
    from fuligo.config.command_line import parse
    from fuligo.config.validate import validate

    config = parse(_flags(run_dir, options.seed, options.num_rollout)).config
    validate(config)
    preflight(config)

    from rich.console import Console

    from fuligo.job import run_to_end
    from fuligo.observability.progress import before_after_table

    console = Console(highlight=False)
    console.print(
        "GRPO with a model of 0.8 million parameters on this machine. It can add digits, but mostly guesses or forgets the carry.\n"
        "Each step: 32 sums, 8 answers to each, a reward of 1 for the right number in the box, no examples.\n"
    )
    outcome = run_to_end(config)
    before, after = outcome.evaluations[0], outcome.evaluations[-1]
    console.print(before_after_table(*(each.groups["held_out"][:NUM_ROWS_SHOWN] for each in (before, after))))
    report = _write_report(run_dir)
    console.print(
        f"report       {report} (open it in a browser)\n"
        f"look closer  fuligo view {run_dir}\n"
        f"metrics      {run_dir}/metrics.jsonl\n"
        f"every answer {run_dir}/samples/*.parquet\n"
        f"timeline     {run_dir}/trace.json (open it at ui.perfetto.dev, or chrome://tracing)\n"
        f"model        {run_dir}/checkpoints/iter_{config.data.num_rollout:07d}/hf\n"
        f"try your own fuligo train --config {run_dir}/config.yaml --run-dir runs/lower-lr --lr 5e-5\n",
        markup=False,
        soft_wrap=True,
    )
    name = f"eval/held_out/mean@{config.eval.n_samples_per_eval_prompt}"
    elapsed_s = time.perf_counter() - STARTED_S
    print(f"reward {before.metrics[name]:.2f} -> {after.metrics[name]:.2f} in {elapsed_s:.1f} s ({run_dir})", flush=True)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("fuligo quickstart", description="GRPO with a tiny model on a CPU, in about a minute.")
    parser.add_argument("--run-dir", help="new or empty directory (default: runs/quickstart-<time>)")
    parser.add_argument("--seed", type=int, default=1, help="seed of data order, sampling and training (default: 1)")
    parser.add_argument("--num-rollout", type=int, help="number of training steps (default: 30)")
    return parser.parse_args(arguments)


def _flags(run_dir: Path, seed: int, num_rollouts: int | None = None) -> list[str]:
    """Return the flags of the shipped config with the paths of this machine."""
    flags = {
        "--config": ASSETS / "config.yaml",
        "--hf-checkpoint": ASSETS / "model",
        "--prompt-data": ASSETS / "train.jsonl",
        "--run-dir": run_dir,
        "--rollout-seed": seed,
        "--seed": seed,
    }
    if num_rollouts is not None:
        flags["--num-rollout"] = num_rollouts
    given = [str(part) for flag, value in flags.items() for part in (flag, value)]
    return [*given, "--eval-prompt-data", "held_out", str(ASSETS / "test.jsonl")]


def _write_report(run_dir: Path) -> Path:
    """Write curves, samples, time and health as one page and return its path; a small report, because the whole command takes a minute."""
    from fuligo.observability.viewer.report import ReportSize, write_report
    from fuligo.observability.viewer.run import RunReader

    path = run_dir / "report.html"
    write_report([RunReader(run_dir, run_dir.name)], path, ReportSize(num_steps=8, num_groups=2, num_troubled=8))
    return path
