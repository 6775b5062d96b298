"""Reader of the phases of a growing trace. Spans of samples are skipped, because the sample files have all of them."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import orjson

from fuligo.observability.trace import BEGIN, DRIVER_PID, ENGINE_PID, OTHER_PID, SAMPLE_PIDS
from fuligo.observability.viewer.tail import LineReader

_SAMPLE_PIDS = {*SAMPLE_PIDS.values(), OTHER_PID}


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """Phase on a track of the trace."""

    name: str
    step: int
    process: int
    lane: int
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    failed: bool = False


class TraceReader(LineReader):
    """Reader of the driver's phases, by step and in the order in which they ended, and of those of the trainer ranks."""

    def _reset(self) -> None:
        self.by_step: dict[int, list[PhaseEvent]] = defaultdict(list)
        self.others_by_step: dict[int, list[PhaseEvent]] = defaultdict(list)
        self.names: dict[int, str] = {}
        """Names of processes."""
        self.begun: dict[tuple[str, int], float] = {}
        """Start of the driver's phases that have not ended, by name and step, seconds since the epoch."""
        self.num_damaged = 0

    @property
    def share_read(self) -> float:
        """Share of the file that has been read."""
        size = self._tail.size_bytes
        return min(1.0, self._tail.offset / size) if size else 1.0

    def _add(self, line: bytes) -> None:
        text = line.strip().rstrip(b",")
        if not text or text in (b"[", b"]"):
            return
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError:
            self.num_damaged += 1
            return
        if not isinstance(event, dict):
            return
        if event.get("ph") == "M" and event.get("name") == "process_name":
            self.names[_number(event.get("pid"))] = str(_dict(event.get("args")).get("name"))
        elif event.get("ph") == "M" and event.get("name") == BEGIN:
            args = _dict(event.get("args"))
            self.begun[str(args.get("phase")), int(_number(args.get("step")))] = _number(event.get("ts")) / 1e6
        elif event.get("ph") == "X" and (pid := _number(event.get("pid"))) not in _SAMPLE_PIDS and pid < ENGINE_PID:
            self._add_phase(event)

    def _add_phase(self, event: dict[str, Any]) -> None:
        args = _dict(event.get("args"))
        start_s = _number(event.get("ts")) / 1e6
        phase = PhaseEvent(
            str(event.get("name")),
            int(_number(args.get("step"))),
            int(_number(event.get("pid"))),
            int(_number(event.get("tid"))),
            start_s,
            start_s + max(0.0, _number(event.get("dur")) / 1e6),
            bool(args.get("failed")),
        )
        if phase.process != DRIVER_PID:
            self.others_by_step[phase.step].append(phase)
            return
        self.by_step[phase.step].append(phase)
        self.begun.pop((phase.name, phase.step), None)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else 0
