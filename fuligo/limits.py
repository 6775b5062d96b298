"""Resources of this process: cores and memory within the limits of its container, open files, garbage collection."""

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SYSTEM = Path("/")
MAX_OPEN_FILES = 2**20
"""Largest soft limit that `raise_open_files` sets. Containers may have a hard limit of 2^30; a program that closes every possible
descriptor would then take minutes."""
OBJECTS_PER_COLLECTION = 10_000
"""Net allocations of objects that start a garbage collection; Python's default is 700."""
MANY_MODULES = 30
"""Smallest number of new modules with which a block counts as the import of a large package; torch has hundreds, repeated code few."""
UNLIMITED_BYTES = 2**60
"""Limits of cgroup v1 above this mean that there is no limit."""


def num_cores(system: Path = SYSTEM) -> int:
    """Return the number of usable cores, at least 1: the size of the affinity mask, or a smaller cgroup quota, rounded down.

    Args:
        system: root of the file system with `proc` and `sys`
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _cpu_quotas(system))]))


def half_the_cores() -> int:
    """Return the number of threads for each of two processes that compute at the same time, at least 1.

    With more threads than cores, each operation waits for a thread that has no core.
    """
    return max(1, num_cores() // 2)


def memory_bytes(system: Path = SYSTEM) -> int:
    """Return the bytes of memory of the machine, or the smallest limit of this process's cgroups if that is less."""
    return min([_meminfo_bytes("MemTotal", system), *(limit for limit, _ in _memory_limits(system))])


def available_memory_bytes(system: Path = SYSTEM) -> int:
    """Return the bytes that can be allocated without swapping: MemAvailable, or what the cgroups' limits leave if that is less."""
    return max(0, min([_meminfo_bytes("MemAvailable", system), *(limit - used for limit, used in _memory_limits(system))]))


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit, at most `MAX_OPEN_FILES`. Child processes inherit the limit.

    Return the soft limit, or `MAX_OPEN_FILES` if it is infinite. Each request in flight needs a connection, and the usual soft limit is
    1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def freeze_garbage_collector() -> None:
    """Exclude all existing objects from garbage collection and collect less often; call it once the long-lived objects of a run exist.

    An engine's answer holds a list for every token. By default, Python collects after every 700 new objects, and each time scans the
    objects of the rollout.
    """
    gc.set_threshold(OBJECTS_PER_COLLECTION, 10, 10)
    gc.freeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable garbage collection in the block, for imports.

    torch and transformers create millions of objects that are never freed. Scanning them takes a fifth of the time of their imports, so a
    block that has imported such packages excludes all existing objects from later collections as well. Others do not: a dead model that
    awaits its collection would stay in memory.
    """
    was_enabled = gc.isenabled()
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if len(sys.modules) >= num_modules + MANY_MODULES:
                gc.freeze()
            gc.enable()


def _cpu_quotas(system: Path) -> Iterator[float]:
    """Yield the quotas of this process's cgroups, in cores."""
    for directory in _cgroups("", system):
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    for directory in _cgroups("cpu", system):
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # -1 means no quota
            yield int(quota) / int(period)


def _memory_limits(system: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and usage of this process's cgroups in bytes; inactive page cache, which the kernel can drop, does not count as used."""
    versions = (("", "memory.max", "memory.current", "inactive_file"),)
    versions += (("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),)
    for controller, limit_file, usage_file, droppable in versions:
        for directory in _cgroups(controller, system):
            limit, usage = _read(directory / limit_file), _read(directory / usage_file)
            if limit.isdecimal() and int(limit) < UNLIMITED_BYTES:
                fields = dict(line.split() for line in _read(directory / "memory.stat").splitlines())
                yield int(limit), max(0, int(usage or 0) - int(fields.get(droppable, 0)))


def _cgroups(controller: str, system: Path) -> list[Path]:
    """Return the directories of this process's cgroup and of those that contain it; empty without them.

    Args:
        controller: controller of cgroups version 1; "" for version 2, which has one tree for all.
    """
    root = system / "sys/fs/cgroup" / controller
    for line in _read(system / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # In a container, the path may be that of the host, and the container's own cgroup be mounted at the root.
            inside = root / path.lstrip("/")
            return [directory for directory in (inside, *inside.parents) if directory.is_relative_to(root)]
    return []


def _meminfo_bytes(name: str, system: Path) -> int:
    for line in _read(system / "proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # systems other than Linux


def _read(file: Path) -> str:
    """Return the content without surrounding space; "" if the file cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
