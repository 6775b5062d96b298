"""Timeline of one step, and the seconds of every step by cause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuligo.observability.viewer.attribution import Cause, Interval, SampleSpans, attribute, concurrency, covered
from fuligo.observability.viewer.metric_columns import MetricColumns
from fuligo.observability.viewer.sample_rows import UNREADABLE, check_size
from fuligo.observability.viewer.trace_reader import PhaseEvent, TraceReader

NUM_LONGEST = 12
NUM_POINTS = 240
"""Number of points of the curve of concurrent samples."""
TRAINER_PHASES = ("score", "train")
NEIGHBORS = 2
"""Number of steps before and after a step whose phases may overlap it, because rollouts run ahead of training."""


@dataclass(frozen=True, slots=True)
class LongSample:
    """One of the samples that finished last."""

    row: int
    index: int
    tokens: int
    status: str
    start_s: float
    """Seconds since the start of the step."""
    end_s: float
    alone_s: float
    """Seconds by which the rollout would have ended earlier without this sample and those that finished after it."""


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Load of one engine during a step."""

    number: int
    in_flight: list[int]
    """[NUM_POINTS] concurrent requests over the window."""
    idle: float
    """Share of the step without a request."""


@dataclass(frozen=True, slots=True)
class PhaseBar:
    """Phase of any step that overlaps the window."""

    track: str
    name: str
    step: int
    start_s: float
    """Seconds since the start of the window."""
    end_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class StepTime:
    """Timeline of one step. Its numbers are rounded, to keep the page's answers small."""

    step: int
    start_s: float
    """Seconds since the epoch."""
    duration_s: float
    causes: list[Cause]
    phases: list[PhaseBar]
    generating: list[int]
    """[NUM_POINTS] concurrent samples over the window; empty if the samples have no times."""
    engines: list[EngineTime]
    """Load of each engine; empty if the samples do not record their engines."""
    longest: list[LongSample]
    trainer_idle: float
    """Share of the step in which the trainer was idle."""
    engines_idle: float | None
    """Share of the step in which no sample was generated; None if spans are not known."""


def step_window(metrics: MetricColumns, trace: TraceReader, step: int) -> Interval | None:
    """Return start and end of a step in seconds since the epoch, from the metrics or else from its phases; None if neither has them."""
    row = metrics.row_of_step(step)
    end, seconds = (None, None) if row is None else (metrics.column("time")[row], metrics.column("perf/step_s")[row])
    if end is not None and seconds:
        return end - seconds, end
    phases = trace.by_step.get(step, [])
    window = (min(phase.start_s for phase in phases), max(phase.end_s for phase in phases)) if phases else (0.0, 0.0)
    return window if window[0] < window[1] else None


def phases_near(by_step: Mapping[int, Sequence[PhaseEvent]], step: int) -> list[PhaseEvent]:
    """Return the phases that can overlap a step: rollouts run ahead, evaluations follow."""
    return [phase for near in range(step - NEIGHBORS, step + NEIGHBORS + 1) for phase in by_step.get(near, ())]


def step_causes(metrics: MetricColumns, trace: TraceReader, step: int) -> list[Cause]:
    """Return the causes of a step from its phases, without reading its samples."""
    window = step_window(metrics, trace, step)
    if window is None:
        return []
    phases = phases_near(trace.by_step, step)
    return attribute(window, phases) if phases else _causes_of_metrics(metrics, step, window)


def _causes_of_metrics(metrics: MetricColumns, step: int, window: Interval) -> list[Cause]:
    """Return the causes of a step without a trace: the seconds of its phases, if they fit into the step."""
    row = metrics.row_of_step(step)
    if row is None:
        return []
    names = [key for key in metrics.columns if key.startswith("perf/") and key.endswith("_s") and key != "perf/step_s"]
    causes = [Cause(key[5:-2], seconds) for key in names if (seconds := metrics.column(key)[row])]
    rest = window[1] - window[0] - sum(cause.seconds for cause in causes)
    if rest < 0:
        return []  # phases overlap, so their seconds cannot be separated
    return sorted([*causes, Cause("between phases", rest)], key=lambda cause: -cause.seconds)


def step_time(metrics: MetricColumns, trace: TraceReader, step: int, files: dict[int, Path]) -> StepTime | None:
    """Return the timeline of a step; None if it was not recorded.

    Args:
        files: existing sample files of the step and of the `NEIGHBORS` steps after it, by step.
    """
    window = step_window(metrics, trace, step)
    if window is None:
        return None
    tables = {of: table for of, path in files.items() if (table := _spans_table(path)) is not None}
    spans = [_spans(table) for table in tables.values()]
    generate = [interval for part in spans for interval in part.intervals(part.name == "generate")]
    reward = [interval for part in spans for interval in part.intervals(part.name == "reward")]
    phases = [phase for phase in phases_near(trace.by_step, step) if phase.end_s > window[0] and phase.start_s < window[1]]
    causes = attribute(window, phases, SampleSpans(generate, reward)) if phases else _causes_of_metrics(metrics, step, window)
    start, length = window[0], window[1] - window[0]
    others = [phase for phase in phases_near(trace.others_by_step, step) if phase.end_s > window[0] and phase.start_s < window[1]]
    trained = covered(window, [(phase.start_s, phase.end_s) for phase in phases if phase.name in TRAINER_PHASES])
    return StepTime(
        step,
        start,
        round(length, 6),
        [Cause(cause.name, round(cause.seconds, 6)) for cause in causes],
        [
            PhaseBar(
                f"{trace.names.get(phase.process, f'process {phase.process}')} {phase.lane}",
                phase.name,
                phase.step,
                round(phase.start_s - start, 6),
                round(phase.end_s - start, 6),
                phase.failed,
            )
            for phase in sorted([*phases, *others], key=lambda phase: (phase.process, phase.lane, phase.start_s))
        ],
        concurrency(window, generate, NUM_POINTS) if generate else [],
        _engine_times(window, spans),
        _longest(tables[step], start) if step in tables else [],
        round(1 - trained / length, 5),
        round(1 - covered(window, generate) / length, 5) if generate else None,
    )


def _spans_table(path: Path) -> pa.Table | None:
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            length = "response_length" if "response_length" in present else "loss_mask"
            names = [name for name in ("index", "status", length, "spans") if name in present]
            check_size(file.metadata, names)
            spans = file.schema_arrow.field("spans").type if "spans" in names else pa.null()
            if not pa.types.is_list(spans) or not pa.types.is_struct(spans.value_type):
                return None
            return file.read(names, use_threads=False)
    except UNREADABLE:
        return None


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans of all samples of a file, [N] each; times in seconds since the epoch."""

    row: np.ndarray
    name: np.ndarray
    start: np.ndarray
    end: np.ndarray
    engine: np.ndarray
    """Number of the engine, -1 if unknown."""

    def intervals(self, wanted: np.ndarray) -> list[Interval]:
        return list(zip(self.start[wanted].tolist(), self.end[wanted].tolist(), strict=True))


def _spans(table: pa.Table) -> _Spans:
    column = table["spans"].combine_chunks()
    counts = column.value_lengths().fill_null(0).to_numpy()
    flat = column.flatten()
    names = np.array(flat.field("name").to_pylist(), dtype=object)
    start, end = (flat.field(name).fill_null(0.0).to_numpy() for name in ("start_s", "end_s"))
    knows_engines = flat.type.get_field_index("engine") >= 0
    engine = flat.field("engine").fill_null(-1).to_numpy() if knows_engines else np.full(len(names), -1)
    return _Spans(np.repeat(np.arange(len(counts)), counts), names, start, end, engine)


def _engine_times(window: Interval, spans: Sequence[_Spans]) -> list[EngineTime]:
    """Return the load of each engine, by number."""
    length = window[1] - window[0]
    times = []
    for number in sorted({int(engine) for part in spans for engine in np.unique(part.engine)} - {-1}):
        busy = [interval for part in spans for interval in part.intervals((part.engine == number) & (part.name == "generate"))]
        times.append(EngineTime(number, concurrency(window, busy, NUM_POINTS), round(1 - covered(window, busy) / length, 5)))
    return times


def _longest(table: pa.Table, start: float) -> list[LongSample]:
    """Return the samples that finished last, latest first. `start`: start of the step, seconds since the epoch."""
    spans = _spans(table)
    num = table.num_rows
    first, last = np.full(num, np.inf), np.full(num, -np.inf)
    np.minimum.at(first, spans.row, spans.start)
    np.maximum.at(last, spans.row, spans.end)
    order = [row for row in np.argsort(-last, kind="stable")[: NUM_LONGEST + 1] if np.isfinite(last[row])]
    fields: dict[str, Any] = {name: table[name].to_pylist() for name in table.schema.names if name != "spans"}
    result = []
    for row, before in pairwise(order):
        result.append(
            LongSample(
                int(row),
                int(_at(fields, "index", row, -1)),
                int(_at(fields, "response_length", row, len(_at(fields, "loss_mask", row, ())))),
                str(_at(fields, "status", row, "")),
                round(float(first[row]) - start, 6),
                round(float(last[row]) - start, 6),
                round(float(last[order[0]] - last[before]), 6),
            )
        )
    return result


def _at(fields: dict[str, Any], name: str, row: int, default: Any) -> Any:
    value = fields[name][row] if name in fields else None
    return default if value is None else value
