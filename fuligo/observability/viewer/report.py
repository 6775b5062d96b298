"""Report of `fuligo view --export`: a page that needs no server, with all curves and a selection of samples and timelines."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fuligo.errors import ConfigError
from fuligo.observability.viewer import answers
from fuligo.observability.viewer.front import page
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.run_files import SampleSet
from fuligo.observability.viewer.sample_rows import PromptOrder

MAX_UPDATES = 1024
"""Maximum number of updates, each of which reads a chunk of the trace (4 MiB)."""
_SETS: tuple[SampleSet, ...] = ("train", "eval")


@dataclass(frozen=True, slots=True)
class ReportSize:
    """Size of the selection in a report, per run."""

    num_steps: int = 12
    """Steps with samples and timelines: the first, the last, and some evenly spaced between."""
    num_evaluations: int = 3
    """Evaluations with samples, chosen in the same way."""
    num_groups: int = 4
    """Whole groups per step; those with mixed rewards first."""
    num_troubled: int = 24
    """Newest additional samples that failed or were truncated, aborted or dropped."""
    num_prompts: int = 25
    """Number of prompts of each kind: lowest and highest pass rate, largest decrease and increase of the mean reward."""
    max_tokens: int = 200_000
    """Total response tokens, for training and evaluations each; samples beyond are listed without their tokens."""


def write_report(runs: Sequence[RunReader], path: Path, size: ReportSize | None = None) -> int:
    """Write the report and return its size in bytes. Raises ConfigError if the file cannot be written."""
    for run in runs:
        run.update_metrics()
        for _ in range(MAX_UPDATES):
            if not run.update_rest(float("inf")):
                break
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = page(f"{title}: fuligo report", report_document(runs, size or ReportSize())).encode()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write --export {path}: {error.strerror}; choose another path") from None
    return len(data)


def report_document(runs: Sequence[RunReader], size: ReportSize) -> dict[str, Any]:
    """Return the answers to the page's requests, for the steps and samples that the report contains."""
    samples = {run.name: {of: _samples(run, of, size) for of in _SETS} for run in runs}
    return {
        "runs": [answers.run_answer(run) for run in runs],
        "metrics": {run.name: answers.metrics_answer(run, [*run.metrics.columns, *run.evaluations.columns], 0, -1) for run in runs},
        "differences": answers.differences_answer(runs),
        "steps": {run.name: answers.steps_answer(run) for run in runs},
        "step": {run.name: _timelines(run, size) for run in runs},
        "health": {run.name: answers.health_answer(run) for run in runs},
        "prompts": {run.name: {of: _prompts(run, of, size) for of in _SETS} for run in runs},
        "samples": {name: {of: lines for of, (lines, _) in by_set.items()} for name, by_set in samples.items()},
        "sample": {name: {of: whole for of, (_, whole) in by_set.items()} for name, by_set in samples.items()},
    }


def chosen_steps(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` steps: the first, the last, and evenly spaced ones between them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]


def chosen_samples(table: pa.Table, steps: Sequence[int], size: ReportSize) -> np.ndarray:
    """Return sorted positions in the index: of whole groups of the steps, and of troubled samples of any step."""
    all_steps, rewards = table["step"].to_numpy(), table["reward"].to_numpy()
    groups = table["group"].fill_null(-1).to_numpy()
    chosen: list[int] = []
    for step in steps:
        here = np.flatnonzero(all_steps == step)
        members = {group: here[groups[here] == group] for group in dict.fromkeys(groups[here].tolist())}
        mixed = sorted(members.values(), key=lambda rows: -_spread(rewards[rows]))
        chosen += [at for rows in mixed[: size.num_groups] for at in rows.tolist()]
    troubled = np.flatnonzero((table["status"].to_numpy() != "completed") | ~table["kept"].to_numpy())
    chosen += troubled[len(troubled) - min(size.num_troubled, len(troubled)) :].tolist()
    return np.array(sorted(set(chosen)), np.int64)


def _spread(rewards: np.ndarray) -> float:
    known = rewards[np.isfinite(rewards)]
    return float(np.std(known)) if len(known) else 0.0


def _timelines(run: RunReader, size: ReportSize) -> dict[str, Any]:
    recorded = [int(step) for step in run.metrics.steps if step is not None]
    return {str(step): answers.step_answer(run, step) for step in chosen_steps(recorded, size.num_steps)}


def _prompts(run: RunReader, of: SampleSet, size: ReportSize) -> list[dict[str, Any]]:
    """Return the first `num_prompts` prompts by pass rate and by change, in both directions, without duplicates."""
    orders: tuple[PromptOrder, ...] = ("pass_rate", "-pass_rate", "change", "-change")
    ends = [row for order in orders for row in answers.prompts_answer(run, order, 0, size.num_prompts, of)["rows"]]
    return list({(row["prompt_key"], row["dataset"]): row for row in ends}.values())


def _samples(run: RunReader, of: SampleSet, size: ReportSize) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    index = run.index(of)
    table = index.table()
    steps = chosen_steps(index.steps(), size.num_steps if of == "train" else size.num_evaluations)
    chosen = table.take(pa.array(chosen_samples(table, steps, size)))
    lines = answers.sample_lines(index, chosen)
    left = size.max_tokens
    whole: dict[str, Any] = {}
    for line in sorted(lines, key=lambda line: (-line["step"], line["row"])):
        left -= line["length"]
        if left < 0:
            break
        if (sample := answers.sample_answer(run, line["step"], line["row"], of)) is not None:
            whole[f"{line['step']}.{line['row']}"] = sample
    return lines, whole
