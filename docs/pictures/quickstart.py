"""Draw the README's picture of `fuligo quickstart` from a real run.

    fuligo quickstart --run-dir runs/quickstart | tee quickstart.txt
    python docs/pictures/quickstart.py runs/quickstart "$(tail -n 1 quickstart.txt)" docs/pictures/quickstart.svg

The panel and the table are those that the command shows; their numbers come from the run directory.
"""

import argparse
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console

from fuligo.observability.progress import LiveProgress, before_after_table
from fuligo.types import Sample, SampleGroup

WIDTH = 104
NUM_ROWS = 6
FONT_FROM_THE_WEB = re.compile(r"@font-face\s*\{[^}]*\}")
"""Pictures in a repository load nothing from elsewhere; the reader's own monospace font will do."""


def panel(run_dir: Path, title: str) -> LiveProgress:
    """Return the progress panel at the end of the run."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    progress = LiveProgress(Console(), title, len(records))
    for record in records:
        progress.record(record)
    return progress


def answers(evaluation: Path) -> dict[str, SampleGroup]:
    """Return the first answer of an evaluation to each question, in the order of the dataset."""
    first: dict[str, SampleGroup] = {}
    for row in pq.read_table(evaluation, columns=["prompt", "label", "response", "reward"]).to_pylist():
        question = json.loads(row["prompt"])[-1]["content"]
        sample = Sample(0, 0, question, np.empty(0, np.int32), row["label"], response=row["response"], reward=row["reward"])
        first.setdefault(question, SampleGroup(0, 0, [sample]))
    return first


def before_and_after(run_dir: Path) -> tuple[list[SampleGroup], list[SampleGroup]]:
    evaluations = sorted((run_dir / "eval").glob("eval_*.parquet"))
    before, after = answers(evaluations[0]), answers(evaluations[-1])
    questions = list(before)[:NUM_ROWS]
    return [before[question] for question in questions], [after[question] for question in questions]


def draw(run_dir: Path, last_line: str) -> str:
    """Return the picture as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(panel(run_dir, f"runs/{run_dir.name}"))
    console.print()
    console.print(before_after_table(*before_and_after(run_dir)))
    console.print(last_line, style="bold", markup=False)
    svg = FONT_FROM_THE_WEB.sub("", console.export_svg(title="fuligo quickstart", unique_id="fuligo-quickstart"))
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="run directory of a quickstart")
    parser.add_argument("last_line", help="the last line that it printed")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    options = parser.parse_args()
    options.svg.write_text(draw(options.run_dir, options.last_line), encoding="utf-8")


if __name__ == "__main__":
    main()
