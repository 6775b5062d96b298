"""GPU readings from lines in the form that nvidia-smi writes, and from a program that prints them in its place."""

import os
import time
from pathlib import Path

import pytest

from fuligo.observability.gpu_usage import GpuMonitor, GpuReading, is_visible, parse_reading, usage_metrics
from tests.metrics_page import undocumented

RECORDED = """\
0, GPU-5b1f2c30-1, 97, 71234, 81559
1, GPU-9d40a7e2-2, 41, 20390, 81559
"""
DEADLINE_S = 60.0


def readings(text: str) -> list[GpuReading]:
    return [reading for line in text.splitlines() if (reading := parse_reading(line)) is not None]


def test_readings_are_parsed_and_other_lines_skipped() -> None:
    assert [(reading.index, reading.utilization) for reading in readings(RECORDED)] == [(0, 0.97), (1, 0.41)]
    assert readings(RECORDED)[0].memory == pytest.approx(71234 / 81559)
    assert readings("Unable to determine the device handle for GPU0\nNo devices were found\n0, GPU-1, 5, [N/A], 0\n") == []
    assert readings("0, GPU-1, [N/A], 5, 10")[0].utilization is None


@pytest.mark.parametrize(("visible", "expected"), [(None, [0, 1]), ("1", [1]), ("", []), ("GPU-5b1f", [0]), ("1, GPU-5b1f", [0, 1])])
def test_gpus_of_others_are_left_out(visible: str | None, expected: list[int]) -> None:
    assert [reading.index for reading in readings(RECORDED) if is_visible(reading, visible)] == expected


def test_metrics_are_means_and_maxima_of_shares_and_are_documented() -> None:
    both = usage_metrics([*readings(RECORDED), GpuReading(0, "GPU-5b1f2c30-1", 0.03, 0.1)])
    assert both["perf/gpu_utilization"] == pytest.approx((0.97 + 0.41 + 0.03) / 3)
    assert both["perf/gpu/0/utilization"] == pytest.approx(0.5)
    assert both["perf/gpu_memory"] == both["perf/gpu/0/memory"] == pytest.approx(71234 / 81559)
    assert undocumented(both) == []
    assert set(usage_metrics(readings(RECORDED)[:1])) == {"perf/gpu_utilization", "perf/gpu_memory"}
    assert usage_metrics([]) == {}


def test_a_monitor_collects_what_the_program_prints_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nwhile :; do cat <<'END'\n{RECORDED}END\nsleep 0.05\ndone\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monitor = GpuMonitor.open()
    assert monitor is not None
    end = time.monotonic() + DEADLINE_S
    while not (metrics := monitor.take()) and time.monotonic() < end:
        time.sleep(0.01)
    monitor.close()
    assert metrics == {"perf/gpu_utilization": pytest.approx(0.41), "perf/gpu_memory": pytest.approx(20390 / 81559)}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_there_is_no_monitor_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert GpuMonitor.open() is None
