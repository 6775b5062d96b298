"""Record and draw the evaluations of examples/word_problems.

    python docs/pictures/tool_use.py record RUN_DIR BASE_DIR docs/pictures/tool-use.json
    python docs/pictures/tool_use.py draw docs/pictures/tool-use.json docs/pictures/tool-use.svg

`record` reads the evaluations of a GRPO run and of `fuligo eval` with the model before the warm start, prints them as a table, and writes
the shares of a held-out problem's answers that are right and that call the tool.
"""

import json
import sys
from pathlib import Path
from typing import Any

from real_runs import draw

SET = "eval/problems"
COLUMNS = {
    "right answers": "mean@4",
    "tool calls": "sample/tool_calls",
    "failed calls": "sample/tool_failures",
    "unreadable calls": "sample/tool_problems",
    "turns": "sample/turns",
    "tokens": "response_len_mean",
}


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, in order."""
    return [json.loads(line) for line in (run / "eval" / "metrics.jsonl").read_text().splitlines()]


def with_call(run: Path, num_rollouts: int) -> float:
    """Return the share of the answers of an evaluation that call the tool."""
    from pyarrow import parquet

    responses = parquet.read_table(run / "eval" / f"eval_{num_rollouts:06d}.parquet", columns=["response"])["response"].to_pylist()
    return sum("<tool_call>" in response for response in responses) / len(responses)


def record(run: Path, base: Path, output: Path) -> None:
    """Print the evaluations as a table and write the two curves."""
    print("| evaluated | called the tool |", *(f"{name} |" for name in COLUMNS))
    print("|---|---|" + "---|" * len(COLUMNS))
    curves: dict[str, list[float]] = {"rollouts": [], "right answers": [], "tool called": []}
    for folder, evaluation in [*((base, each) for each in evaluations(base)), *((run, each) for each in evaluations(run))]:
        num = evaluation["num_rollouts"]
        called, right = with_call(folder, num), evaluation[f"{SET}/{COLUMNS['right answers']}"]
        values = [evaluation.get(f"{SET}/{key}", 0.0) for key in COLUMNS.values()]
        name = "before the warm start" if folder == base else f"rollout {num}" if num else "after the warm start"
        print(f"| {name} | {called:.3f} |", *(f"{value:.3f} |" for value in values))
        if folder == run:
            for key, value in zip(curves, (num, right, called), strict=True):
                curves[key].append(round(value, 3))
    output.write_text(json.dumps(curves) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["record", run, base, output]:
            record(Path(run), Path(base), Path(output))
        case ["draw", source, output]:
            draw(Path(source), Path(output), "held-out word problems")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
