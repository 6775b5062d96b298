"""Record and draw the rewards of a run and of one with --exact-on-policy.

    python docs/pictures/exact_runs.py record USUAL_RUN EXACT_RUN docs/pictures/exact-runs.json
    python docs/pictures/exact_runs.py draw docs/pictures/exact-runs.json docs/pictures/exact-runs.svg

`record` prints the medians of both runs' times, and writes the mean rewards of ten rollouts each.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from real_runs import draw

ROLLOUTS_PER_POINT = 10
TICKS = (0, 50, 100, 150, 200)
NUM_WARM_UP = 3
TIMES = ("perf/step_s", "perf/rollout_s", "perf/score_s", "perf/train_s", "perf/sync_s")


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def record(usual: Path, exact: Path, output: Path) -> None:
    """Print times and differences as a table and write the two curves."""
    curves: dict[str, list[float]] = {}
    for name, run in (("usual", usual), ("exact", exact)):
        found = steps(run)
        times = [statistics.median(step[key] for step in found[NUM_WARM_UP:]) for key in TIMES]
        difference = max(step.get("train/logprob_abs_diff", 0.0) for step in found)  # absent if nothing was trained
        print(f"| {name} |", *(f"{seconds:.2f} |" for seconds in times), f"{difference:.3f} |")
        rewards = [step["rollout/reward_mean"] for step in found]
        points = range(0, len(rewards), ROLLOUTS_PER_POINT)
        curves["rollouts"] = [start + ROLLOUTS_PER_POINT for start in points]
        curves[name] = [round(statistics.mean(rewards[start : start + ROLLOUTS_PER_POINT]), 3) for start in points]
    output.write_text(json.dumps(curves) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["record", usual, exact, output]:
            record(Path(usual), Path(exact), Path(output))
        case ["draw", source, output]:
            draw(Path(source), Path(output), "mean reward of ten rollouts", TICKS)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
