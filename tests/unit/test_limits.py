"""Limits of the container, read from fake files of cgroup versions 1 and 2."""

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fuligo import limits
from fuligo.limits import available_memory_bytes, collector_paused, freeze_garbage_collector, memory_bytes, num_cores, raise_open_files

GIB = 1024**3
PLAIN = {"proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemFree: 1024 kB\nMemAvailable: {48 * 1024**2} kB\n"}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in (PLAIN | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    unlimited = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"}
    v1 = {"proc/self/cgroup": "4:memory:/\n1:cpu,cpuacct:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    v1["sys/fs/cgroup/cpu/cpu.cfs_quota_us"], v1["sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "-1", "100000"
    for number, files in enumerate(({}, unlimited, v1)):
        root = system(tmp_path / str(number), files)
        assert (num_cores(root), memory_bytes(root), available_memory_bytes(root)) == (16, 64 * GIB, 48 * GIB)


@pytest.mark.parametrize(("quota", "cores"), [("350000", 3), ("50000", 1), ("9900000", 16)])
def test_a_quota_of_version_2_limits_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    assert num_cores(system(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})) == cores


def test_limits_of_version_2_hold_at_every_level(tmp_path: Path) -> None:
    """A pod's limit stands above its container's; what was read from files once can be dropped."""
    pod = "sys/fs/cgroup/kubepods/pod1"
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/container",
            "sys/fs/cgroup/cpu.max": "max 100000",
            f"{pod}/cpu.max": "400000 100000",
            f"{pod}/container/cpu.max": "800000 100000",
            f"{pod}/memory.max": str(8 * GIB),
            f"{pod}/memory.current": str(6 * GIB),
            f"{pod}/memory.stat": f"anon {2 * GIB}\ninactive_file {3 * GIB}",
            f"{pod}/container/memory.max": str(12 * GIB),
            f"{pod}/container/memory.current": str(10 * GIB),
        },
    )
    assert (num_cores(root), memory_bytes(root), available_memory_bytes(root)) == (4, 8 * GIB, 2 * GIB)


def test_limits_of_version_1_in_a_container_that_sees_the_path_of_the_host(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
        },
    )
    assert (num_cores(root), memory_bytes(root), available_memory_bytes(root)) == (2, 4 * GIB, 2 * GIB)


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000"}
    assert available_memory_bytes(system(tmp_path, {"proc/self/cgroup": "0::/", **files})) == 0


def test_this_machine_can_be_asked() -> None:
    assert num_cores() >= 1
    assert 0 < available_memory_bytes() <= memory_bytes()


@pytest.mark.parametrize(("hard", "most", "raised"), [(4096, 2**20, 4096), (4096, 2048, 2048)])
def test_open_files_are_raised_for_this_process_and_its_children(hard: int, most: int, raised: int) -> None:
    script = (
        "import resource, subprocess, sys; from fuligo import limits\n"
        f"limits.MAX_OPEN_FILES = {most}; print(limits.raise_open_files(), flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))'], check=True)"
    )
    low = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", script], preexec_fn=low, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == [str(raised), str(raised), str(hard)]


def test_every_command_raises_open_files() -> None:
    script = (
        "import atexit, resource; from fuligo.cli import program\n"
        "atexit.register(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))\n"
        "program(['--help'])"
    )
    low = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 3000))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", script], preexec_fn=low, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split()[-1] == "3000"


def test_a_high_limit_of_open_files_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(soft, limits.MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_frozen_heap_is_not_collected_and_collections_are_rarer() -> None:
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(700, 10, 10)  # Python's own; a run in this process may have changed it
    try:
        freeze_garbage_collector()
        assert gc.get_freeze_count() > num_frozen
        assert gc.get_threshold()[0] > 700
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize(("num_modules", "are_frozen"), [(limits.MANY_MODULES, True), (limits.MANY_MODULES - 1, False)])
def test_only_blocks_of_many_imports_freeze_what_there_is(num_modules: int, monkeypatch: pytest.MonkeyPatch, *, are_frozen: bool) -> None:
    num_frozen = gc.get_freeze_count()
    with collector_paused():
        assert not gc.isenabled()
        for number in range(num_modules):
            monkeypatch.setitem(sys.modules, f"new_{number}", ModuleType(f"new_{number}"))
    assert gc.isenabled()
    assert (gc.get_freeze_count() > num_frozen) == are_frozen
