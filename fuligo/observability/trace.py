"""`trace.json`: what driver and trainer ranks did when, what engines and samples were busy with; Chrome's trace format, for Perfetto.

The file is a JSON array without its closing bracket, which the format allows: it can be opened at any time, also after a kill.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from fuligo.errors import FuligoError
from fuligo.formats.disk import writing
from fuligo.observability.files import append, open_to_append
from fuligo.types import Sample, Span

DRIVER_PID = 1
SAMPLE_PIDS = {"generate": 2, "reward": 3, "wait": 4}
OTHER_PID = 5
"""Spans that hooks name themselves."""
RANK_PID = 1_000
"""Of trainer rank 0; the others follow."""
ENGINE_PID = 1_000_000
"""Of engine 0; the others follow. What was generated nobody knows where has a process of its own."""
BEGIN = "phase_begins"
"""An event that viewers of traces pass over: what the driver does now, before its end is known."""
SEND = "send"
"""What a rank calls the time in which it hands weights to the engines."""
MAX_RANKS = 32
"""Ranks of a step that are written: rank 0, and those that computed longest."""
MAX_LANES = 64
"""Tracks of one kind of span, or of one engine; more cannot be looked at, and a wide rollout would need thousands."""
MAX_SPANS_PER_STEP = 512
"""The longest ones are kept: it is the stragglers that one looks for. All spans are in samples/."""

_ARRAY_START = b"[\n"

PhaseListener = Callable[[str, int], None]
Event = dict[str, Any]


@dataclass(eq=False)
class Phase:
    """A stretch of the driver's time; `with trace.phase("train", step): ...`. May hold others, and run beside others."""

    trace: Trace
    name: str
    step: int
    lane: int = 0
    start_s: float = 0.0
    parent: Phase | None = field(default=None, repr=False)

    def __enter__(self) -> Phase:
        self.trace._enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.trace._exit(self, failed=kind is not None)


_current_phase: ContextVar[Phase | None] = ContextVar("current_phase", default=None)


class Trace:
    """Writes events as they end. Safe to use from several tasks and threads: phases that overlap get tracks of their own."""

    def __init__(self, path: Path, *, max_bytes: int = 64 * 1024**2) -> None:
        """
        Args:
            path: continued where it exists.
            max_bytes: beyond it phases alone are written, no spans of samples.
        """
        self.on_phase: PhaseListener | None = None
        """Called with name and step when a phase begins."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lanes: list[list[Phase]] = []
        self._durations: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._epoch_s = time.time() - time.perf_counter()
        self.path = path
        self._open()

    def phase(self, name: str, step: int) -> Phase:
        """A phase of rollout `step`; `name` is a word such as rollout, score, train, sync, eval, save."""
        return Phase(self, name, step)

    def samples(self, step: int, samples: Iterable[Sample]) -> None:
        """The spans of a rollout's samples, packed to few tracks."""
        if self._num_bytes < self._max_bytes:
            self._write_named(_sample_events(step, samples))

    def ranks(self, step: int, spans: Sequence[Sequence[Span]]) -> None:
        """What the trainer's ranks did since the training before, by rank, each by its own clock."""
        if self._num_bytes < self._max_bytes:
            self._write_named(_rank_events(step, spans))

    def take_durations(self, step: int) -> dict[str, float]:
        """Seconds spent in each phase of a step so far, by name; forgets them."""
        with self._lock:
            return dict(self._durations.pop(step, {}))

    def cut_back(self, step: int) -> None:
        """Take out what belongs to `step` and later ones."""
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
        """Processes beside the fixed ones that this process wrote the names of."""
        if self._num_bytes == 0:
            append(self._fd, _ARRAY_START, self.path)
            self._write(_track_names())

    def _enter(self, phase: Phase) -> None:
        phase.parent = parent = _current_phase.get()
        with self._lock:
            nested = parent is not None and parent.trace is self and self._innermost(parent)
            phase.lane = parent.lane if parent is not None and nested else self._free_lane()
            self._lanes[phase.lane].append(phase)
            phase.start_s = time.perf_counter()
        _current_phase.set(phase)
        self._write([_begin(phase.name, phase.step, self._epoch_s + phase.start_s)])
        if self.on_phase is not None:
            self.on_phase(phase.name, phase.step)

    def _exit(self, phase: Phase, *, failed: bool) -> None:
        _current_phase.set(phase.parent)
        with self._lock:
            duration = time.perf_counter() - phase.start_s
            self._lanes[phase.lane].remove(phase)
            self._durations[phase.step][phase.name] += duration
        args = {"step": phase.step, "failed": True} if failed else {"step": phase.step}
        with suppress(FuligoError) if failed else nullcontext():  # the phase's own error is the cause
            self._write([_complete(phase.name, (DRIVER_PID, phase.lane), self._epoch_s + phase.start_s, duration, args)])

    def _innermost(self, phase: Phase) -> bool:
        """Nothing else runs inside: a second child at the same time would overlap on the track."""
        stack = self._lanes[phase.lane]
        return bool(stack) and stack[-1] is phase

    def _free_lane(self) -> int:
        for lane, stack in enumerate(self._lanes):
            if not stack:
                return lane
        self._lanes.append([])
        return len(self._lanes) - 1

    def _write_named(self, events: list[Event]) -> None:
        """With the names of ranks and engines that appear for the first time."""
        new = {pid for event in events if (pid := event["pid"]) >= RANK_PID} - self._named
        self._named |= new
        self._write([*(_process_name(pid, _name_of(pid)) for pid in sorted(new)), *events])

    def _write(self, events: list[Event]) -> None:
        data = b"".join(map(_line, events))
        with self._lock:
            self._num_bytes += len(data)
            append(self._fd, data, self.path)


def read_trace(path: Path) -> list[Event]:
    """All whole events of a trace that may still be written to, or that a crash tore."""
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
    """An event with a duration on the track (process, thread)."""
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


def _track_names() -> list[Event]:
    names = {DRIVER_PID: "driver", **{pid: f"samples: {name}" for name, pid in SAMPLE_PIDS.items()}, OTHER_PID: "samples: other"}
    return [_process_name(pid, name) for pid, name in names.items()]


def _process_name(pid: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}


def _name_of(pid: int) -> str:
    return f"engine {pid - ENGINE_PID}" if pid >= ENGINE_PID else f"rank {pid - RANK_PID}"


def _sample_events(step: int, samples: Iterable[Sample]) -> list[Event]:
    """Spans sorted into lanes in which no two overlap; those for which no lane is free are left out."""
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
        # Weights that were sent since the training before are those of the step before.
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
