"""The timeline of one step, and every step's seconds by cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuligo.observability.viewer.attribution import Cause, Interval, SampleSpans, attribute, concurrency, covered
from fuligo.observability.viewer.metric_columns import MetricColumns
from fuligo.observability.viewer.trace_reader import PhaseEvent, TraceReader

NUM_LONGEST = 12
NUM_POINTS = 240
"""Of the curve of samples generated at the same time."""
TRAINER_PHASES = ("score", "train")
NEIGHBOURS = 2
"""Steps whose samples may be at work in a step: rollouts run ahead of training."""


@dataclass(frozen=True, slots=True)
class LongSample:
    """One of the last to be done."""

    row: int
    index: int
    tokens: int
    status: str
    start_s: float
    end_s: float
    alone_s: float
    """How much earlier all would have been done without it and those after it."""


@dataclass(frozen=True, slots=True)
class StepTime:
    step: int
    window: Interval
    causes: list[Cause]
    phases: list[tuple[str, PhaseEvent]]
    """Track and phase, of all steps that reach into the window."""
    generating: list[int]
    """Samples generated at the same time, over the window."""
    longest: list[LongSample]
    trainer_idle: float
    """Share of the step."""
    engines_idle: float | None
    """Share of the step in which no sample was generated; None where spans are not known."""


def step_window(metrics: MetricColumns, trace: TraceReader, step: int) -> Interval | None:
    """From the end of the step before to the end of this one; by its phases where the metrics do not say."""
    row = metrics.row_of_step(step)
    end, seconds = (None, None) if row is None else (metrics.column("time")[row], metrics.column("perf/step_s")[row])
    if end is not None and seconds:
        return end - seconds, end
    phases = trace.by_step.get(step)
    return (min(phase.start_s for phase in phases), max(phase.end_s for phase in phases)) if phases else None


def phases_near(trace: TraceReader, step: int) -> list[PhaseEvent]:
    """Those that can reach into a step: rollouts run ahead, evaluations follow."""
    return [phase for near in range(step - NEIGHBOURS, step + NEIGHBOURS + 1) for phase in trace.by_step.get(near, ())]


def step_causes(metrics: MetricColumns, trace: TraceReader, step: int) -> list[Cause]:
    """By phases alone, which costs no file."""
    window = step_window(metrics, trace, step)
    if window is None:
        return []
    phases = phases_near(trace, step)
    return attribute(window, phases) if phases else _causes_of_metrics(metrics, step, window)


def _causes_of_metrics(metrics: MetricColumns, step: int, window: Interval) -> list[Cause]:
    """Without a trace: the phases' seconds, where they fit into the step."""
    row = metrics.row_of_step(step)
    if row is None:
        return []
    names = [key for key in metrics.columns if key.startswith("perf/") and key.endswith("_s") and key != "perf/step_s"]
    causes = [Cause(key[5:-2], seconds) for key in names if (seconds := metrics.column(key)[row])]
    rest = window[1] - window[0] - sum(cause.seconds for cause in causes)
    if rest < 0:
        return []  # phases overlap: their seconds cannot be told apart
    return sorted([*causes, Cause("between phases", rest)], key=lambda cause: -cause.seconds)


def step_time(metrics: MetricColumns, trace: TraceReader, step: int, files: dict[int, Path]) -> StepTime | None:
    """
    Args:
        files: samples of the step and of its neighbours, where there are any.
    """
    window = step_window(metrics, trace, step)
    if window is None:
        return None
    tables = {of: table for of, path in files.items() if (table := _spans_table(path)) is not None}
    generate = [interval for table in tables.values() for interval in _intervals(table, "generate")]
    reward = [interval for table in tables.values() for interval in _intervals(table, "reward")]
    phases = [phase for phase in phases_near(trace, step) if phase.end_s > window[0] and phase.start_s < window[1]]
    causes = attribute(window, phases, SampleSpans(generate, reward)) if phases else _causes_of_metrics(metrics, step, window)
    length = window[1] - window[0]
    trained = covered(window, [(phase.start_s, phase.end_s) for phase in phases if phase.name in TRAINER_PHASES])
    return StepTime(
        step,
        window,
        causes,
        [(f"{trace.process_name(phase.process)} {phase.lane}", phase) for phase in sorted(phases, key=lambda phase: phase.start_s)],
        concurrency(window, generate, NUM_POINTS) if generate else [],
        _longest(tables[step]) if step in tables else [],
        1 - trained / length,
        1 - covered(window, generate) / length if generate else None,
    )


def _spans_table(path: Path) -> pa.Table | None:
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in ("index", "status", "loss_mask", "spans") if name in file.schema_arrow.names]
            return file.read(names, use_threads=False) if "spans" in names else None
    except (OSError, pa.ArrowException):
        return None


def _spans(table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of all spans: row, name, start, end."""
    column = table["spans"].combine_chunks()
    counts = column.value_lengths().fill_null(0).to_numpy()
    flat = column.flatten()
    names = np.array(flat.field("name").to_pylist(), dtype=object)
    start, end = (flat.field(name).fill_null(0.0).to_numpy() for name in ("start_s", "end_s"))
    return np.repeat(np.arange(len(counts)), counts), names, start, end


def _intervals(table: pa.Table, name: str) -> list[Interval]:
    _, names, start, end = _spans(table)
    wanted = names == name
    return list(zip(start[wanted].tolist(), end[wanted].tolist(), strict=True))


def _longest(table: pa.Table) -> list[LongSample]:
    """The samples that were done last, latest first."""
    rows, _, start, end = _spans(table)
    num = table.num_rows
    first, last = np.full(num, np.inf), np.full(num, -np.inf)
    np.minimum.at(first, rows, start)
    np.maximum.at(last, rows, end)
    order = [row for row in np.argsort(-last, kind="stable")[: NUM_LONGEST + 1] if np.isfinite(last[row])]
    fields: dict[str, Any] = {name: table[name].to_pylist() for name in table.schema.names if name in ("index", "status", "loss_mask")}
    result = []
    for row, before in zip(order, [*order[1:], None], strict=True):
        if len(result) == NUM_LONGEST or before is None:
            break
        result.append(
            LongSample(
                int(row),
                int(_at(fields, "index", row, -1)),
                len(_at(fields, "loss_mask", row, ())),
                str(_at(fields, "status", row, "")),
                float(first[row]),
                float(last[row]),
                float(last[order[0]] - last[before]),
            )
        )
    return result


def _at(fields: dict[str, Any], name: str, row: int, default: Any) -> Any:
    value = fields[name][row] if name in fields else None
    return default if value is None else value
