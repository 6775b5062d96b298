"""Metrics `perf/gpu*`: memory and utilization of this machine's GPUs during a step, read by one `nvidia-smi` process."""

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

logger = logging.getLogger(__name__)

INTERVAL_S = 5
"""Seconds between readings."""
_QUERY = ("--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuReading:
    """State of one GPU at one moment."""

    index: int
    uuid: str
    utilization: float | None
    """Share of the driver's last sample period (at most 1 s) in which a kernel ran; None if it is not reported, as for a MIG device."""
    memory: float
    """Share of the memory in use, by all processes."""


def parse_reading(line: str) -> GpuReading | None:
    """Parse `0, GPU-8f6c..., 97, 71234, 81559`; None for any other line, such as a message of a broken driver."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 5 or not all(cells[at].isdigit() for at in (0, 3, 4)) or int(cells[4]) == 0:
        return None
    utilization = int(cells[2]) / 100 if cells[2].isdigit() else None
    return GpuReading(int(cells[0]), cells[1], utilization, int(cells[3]) / int(cells[4]))


def is_visible(reading: GpuReading, visible: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES, given as indices or the beginnings of UUIDs, leaves this GPU to the run."""
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return visible is None or any(name == str(reading.index) or (not name.isdigit() and reading.uuid.startswith(name)) for name in names)


def usage_metrics(readings: Sequence[GpuReading]) -> dict[str, float]:
    """Return `perf/gpu_utilization` (mean) and `perf/gpu_memory` (maximum) of all GPUs, and with several GPUs also of each.

    Empty without readings; without the utilization if the driver does not report it.
    """
    if not readings:
        return {}
    metrics = _usage(readings, "perf/gpu_utilization", "perf/gpu_memory")
    indices = sorted({reading.index for reading in readings})
    for index in indices if len(indices) > 1 else ():
        own = [reading for reading in readings if reading.index == index]
        metrics |= _usage(own, f"perf/gpu/{index}/utilization", f"perf/gpu/{index}/memory")
    return metrics


def _usage(readings: Sequence[GpuReading], utilization: str, memory: str) -> dict[str, float]:
    known = [reading.utilization for reading in readings if reading.utilization is not None]
    return ({utilization: fmean(known)} if known else {}) | {memory: max(reading.memory for reading in readings)}


class GpuMonitor:
    """One `nvidia-smi` process that prints a reading of every GPU at an interval, and a thread that collects them.

    If the Python process dies, the next print of `nvidia-smi` fails and ends it.
    """

    def __init__(self, process: subprocess.Popen[str], visible: str | None) -> None:
        self._process = process
        self._visible = visible
        self._lock = threading.Lock()
        self._readings: list[GpuReading] = []
        self._thread = threading.Thread(target=self._read, daemon=True, name="gpu-usage")
        self._thread.start()

    @classmethod
    def open(cls, interval_s: int = INTERVAL_S) -> Self | None:
        """Start `nvidia-smi`; return None if it is not installed or cannot be run."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return None
        command = [program, *_QUERY, f"--loop={interval_s}"]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError as error:
            logger.warning("cannot run %s: %s; the run has no metrics perf/gpu*", program, error)
            return None
        return cls(process, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def take(self) -> dict[str, float]:
        """Return `perf/gpu*` of the readings since the last call; empty if there were none."""
        with self._lock:
            readings, self._readings = self._readings, []
        return usage_metrics(readings)

    def close(self) -> None:
        """End the process and the thread."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_TIMEOUT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reading = parse_reading(line)
            if reading is not None and is_visible(reading, self._visible):
                with self._lock:
                    self._readings.append(reading)
