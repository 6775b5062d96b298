"""Seconds of a `fuligo plan` process, compared with an interpreter that does nothing and one that only imports torch.

    python benchmarks/plan.py [--repeats 5] [--config FILE]

The programs run alternately, `--repeats` times, and the best result of each counts, so that other work on the machine affects all equally.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "examples" / "glm5.2-744b" / "config.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config to plan (default: a run on 256 GPUs)")
    options = parser.parse_args()
    programs = {
        "python, doing nothing": ["-c", "pass"],
        "fuligo plan": ["-m", "fuligo", "plan", "--config", str(options.config)],
        "fuligo plan --html": ["-m", "fuligo", "plan", "--config", str(options.config), "--html", "/dev/null"],
        "python, import torch": ["-c", "import torch"],
    }
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(options.repeats):
        for name, arguments in programs.items():
            best[name] = min(best[name], duration_s(arguments))
    bare_s = best["python, doing nothing"]
    for name, best_s in best.items():
        print(f"{name:<22} {best_s:6.3f} s  {best_s / bare_s:5.1f} x the bare interpreter")


def duration_s(arguments: list[str]) -> float:
    """Return the wall time of an interpreter from start to exit."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
