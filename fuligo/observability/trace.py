"""Trace of a run (`trace.json`) in Chrome's format, for Perfetto: phases of the driver, spans of the trainer ranks, engines and samples.

The file is a JSON array without its closing bracket, which the format allows, so that it can be opened at any time, even after a kill.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fuligo.errors import FuligoError
from fuligo.formats.disk import writing
from fuligo.observability.jsonl import append, open_to_append
from fuligo.types import Sample, Span

DOING = {
    "start": "loading",
    "rollout": "sampling",
    "score": "scoring",
    "train": "training",
    "sync": "syncing weights",
    "eval": "evaluating",
    "save": "saving a checkpoint",
    "record": "writing samples",
}
"""Display names of the driver's phases."""
DRIVER_PID = 1
SAMPLE_PIDS = {"generate": 2, "reward": 3}
OTHER_PID = 5
RANK_PID = 1_000
"""Process id in the trace of trainer rank 0; the other ranks follow."""
ENGINE_PID = 1_000_000
"""Process id in the trace of engine 0; the other engines follow. Spans without a known engine are under `SAMPLE_PIDS` or `OTHER_PID`."""
BEGIN = "phase_begins"
"""Name of the event that marks the beginning of a phase, since the phase itself is written at its end; trace viewers ignore it."""
SEND = "send"
"""Name of the span in which a rank sends weights to the engines."""
MAX_RANKS = 32
"""Maximum number of ranks written per step: rank 0 and those that computed longest."""
MAX_LANES = 64
"""Maximum number of tracks per engine or kind of span; a large rollout would need thousands, too many to read in a trace viewer."""
MAX_SPANS_PER_STEP = 512
"""Maximum number of spans written per step: the longest, which show stragglers. All spans are in samples/."""

_ARRAY_START = b"[\n"

PhaseListener = Callable[[str, int], None]
Event = dict[str, Any]


@dataclass(eq=False)
class _Phase:
    """Phase of the driver in progress, and its track."""

    trace: Trace
    lane: int


_current_phase: ContextVar[_Phase | None] = ContextVar("current_phase", default=None)
"""Innermost phase in progress in this task; None if there is none."""


class Trace:
    """Writer of a trace. Safe to use from several tasks and threads; phases that overlap get their own tracks."""

    def __init__(self, path: Path, *, max_bytes: int = 64 * 1024**2) -> None:
        """Open the trace at `path`, and append to it if it exists. Beyond `max_bytes`, only phases are written."""
        self.on_phase: PhaseListener | None = None
        """Function called with name and step when a phase begins; None: none."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lanes: list[list[_Phase]] = []
        self._durations: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._epoch_s = time.time() - time.perf_counter()
        self.path = path
        self._open()

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Time a phase of rollout `step` in a block; `name` is usually a key of `DOING`. Phases may nest and overlap."""
        parent = _current_phase.get()
        with self._lock:
            # A second child at the same time would overlap the first on the track of their parent.
            nested = parent is not None and parent.trace is self and self._lanes[parent.lane][-1:] == [parent]
            phase = _Phase(self, parent.lane if parent is not None and nested else self._free_lane())
            self._lanes[phase.lane].append(phase)
            start_s = time.perf_counter()
        _current_phase.set(phase)
        self._write([_begin(name, step, self._epoch_s + start_s)])
        if self.on_phase is not None:
            self.on_phase(name, step)
        args, suppressed = {"step": step, "failed": True}, suppress(FuligoError)  # the phase's own error must be raised
        try:
            yield
            args, suppressed = {"step": step}, nullcontext()
        finally:
            _current_phase.set(parent)
            with self._lock:
                duration = time.perf_counter() - start_s
                self._lanes[phase.lane].remove(phase)
                self._durations[step][name] += duration
            with suppressed:
                self._write([_complete(name, (DRIVER_PID, phase.lane), self._epoch_s + start_s, duration, args)])

    def samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Write the spans of a rollout's samples, packed into few tracks."""
        if self._num_bytes < self._max_bytes:
            self._write_named(_sample_events(step, samples))

    def ranks(self, step: int, spans: Sequence[Sequence[Span]]) -> None:
        """Write the spans of each trainer rank since the previous training; `step` is the rollout that they have just trained on."""
        if self._num_bytes < self._max_bytes:
            self._write_named(_rank_events(step, spans))

    def take_durations(self, step: int) -> dict[str, float]:
        """Return the seconds spent in each phase of a step so far, by name of the phase, and forget them."""
        with self._lock:
            return dict(self._durations.pop(step, {}))

    def cut_back(self, step: int) -> None:
        """Remove the events of `step` and later steps, and forget the durations that were not taken yet."""
        with self._lock:
            self._durations.clear()
        kept = [event for event in read_trace(self.path) if event["args"].get("step", -1) < step]
        replacement = self.path.with_name(f".{self.path.name}.tmp")
        with writing(self.path):
            replacement.write_bytes(_ARRAY_START + b"".join(map(_line, kept)))
            os.close(self._fd)
            replacement.replace(self.path)
        self._open()

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> None:
        self._fd = open_to_append(self.path)
        self._num_bytes = os.fstat(self._fd).st_size
        self._named: set[int] = set()
        """Ranks and engines whose names have been written."""
        if self._num_bytes == 0:
            append(self._fd, _ARRAY_START, self.path)
            names = {DRIVER_PID: "driver", **{pid: f"samples: {name}" for name, pid in SAMPLE_PIDS.items()}, OTHER_PID: "samples: other"}
            self._write([_process_name(pid, name) for pid, name in names.items()])

    def _free_lane(self) -> int:
        for lane, stack in enumerate(self._lanes):
            if not stack:
                return lane
        self._lanes.append([])
        return len(self._lanes) - 1

    def _write_named(self, events: list[Event]) -> None:
        """Write events, preceded by the names of ranks and engines that appear for the first time."""
        new = {pid for event in events if (pid := event["pid"]) >= RANK_PID} - self._named
        self._named |= new
        names = {pid: f"engine {pid - ENGINE_PID}" if pid >= ENGINE_PID else f"rank {pid - RANK_PID}" for pid in sorted(new)}
        self._write([*(_process_name(pid, name) for pid, name in names.items()), *events])

    def _write(self, events: list[Event]) -> None:
        data = b"".join(map(_line, events))
        with self._lock:
            self._num_bytes += len(data)
            append(self._fd, data, self.path)


def read_trace(path: Path) -> list[Event]:
    """Read all complete events of a trace that may still be growing, or was torn by a crash."""
    return [event for line in path.read_bytes().splitlines() if (event := _parse(line)) is not None]


def _line(event: Event) -> bytes:
    return orjson.dumps(event) + b",\n"


def _parse(line: bytes) -> Event | None:
    try:
        event = orjson.loads(line.rstrip(b",\r\n"))
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None


def _complete(name: str, track: tuple[int, int], start_s: float, duration_s: float, args: dict[str, Any]) -> Event:
    """Return an event with a duration on the track (process, thread)."""
    return {
        "name": name,
        "ph": "X",
        "pid": track[0],
        "tid": track[1],
        "ts": round(start_s * 1e6),
        "dur": max(round(duration_s * 1e6), 0),
        "args": args,
    }


def _begin(name: str, step: int, start_s: float) -> Event:
    args = {"phase": name, "step": step}
    return {"name": BEGIN, "ph": "M", "pid": DRIVER_PID, "tid": 0, "ts": round(start_s * 1e6), "args": args}


def _process_name(pid: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}


def _sample_events(step: int, samples: Iterable[Sample]) -> list[Event]:
    """Return events for the longest spans, on tracks where they do not overlap; spans for which no track is free are left out."""
    spans = [(span, sample) for sample in samples for span in sample.spans]
    longest = sorted(spans, key=lambda pair: pair[0].start_s - pair[0].end_s)[:MAX_SPANS_PER_STEP]
    lane_ends: dict[int, list[float]] = defaultdict(list)
    events: list[Event] = []
    for span, sample in sorted(longest, key=lambda pair: pair[0].start_s):
        pid = SAMPLE_PIDS.get(span.name, OTHER_PID) if span.engine is None else ENGINE_PID + span.engine
        lane = _first_free(lane_ends[pid], span.start_s)
        if lane is None:
            continue
        lane_ends[pid][lane] = span.end_s
        num_tokens = sample.response_length if span.engine is None else span.num_tokens
        args = {"step": step, "index": sample.index, "tokens": num_tokens, "status": str(sample.status)}
        events.append(_complete(span.name, (pid, lane), span.start_s, span.end_s - span.start_s, args))
    return events


def _rank_events(step: int, by_rank: Sequence[Sequence[Span]]) -> list[Event]:
    def busy_s(rank: int) -> float:
        return sum(span.end_s - span.start_s for span in by_rank[rank])

    longest = sorted(range(1, len(by_rank)), key=busy_s, reverse=True)[: MAX_RANKS - 1]
    return [
        # Weights sent since the previous training belong to the previous step.
        _complete(span.name, (RANK_PID + rank, 0), span.start_s, span.end_s - span.start_s, {"step": max(0, step - (span.name == SEND))})
        for rank in ([0, *sorted(longest)] if by_rank else [])
        for span in by_rank[rank]
    ]


def _first_free(lane_ends: list[float], start_s: float) -> int | None:
    for lane, end_s in enumerate(lane_ends):
        if end_s <= start_s:
            return lane
    if len(lane_ends) == MAX_LANES:
        return None
    lane_ends.append(start_s)
    return len(lane_ends) - 1
