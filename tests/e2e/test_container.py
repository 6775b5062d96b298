"""A run as the first process of a container: 64 MiB of shared memory, no init process, read-only packages, no HOME."""

import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fuligo.quantities import count
from tests.e2e.command import REPOSITORY, environment, in_own_process
from tests.e2e.conftest import Job
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.records import metrics
from tests.e2e.test_resume import INTERRUPTED

BOOT = """\
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
for directory in "$1" "$2"; do
  mount --bind "$directory" "$directory"
  mount -o remount,bind,ro "$directory"
done
shift 2
unset HOME
exec "$@"
"""
NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str | None:
    """Return the reason why this machine cannot start such a container, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "not installed: unshare, setpriv (package util-linux)"
    done = subprocess.run([*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


def zombies(parent: int) -> set[int]:
    """Return the children of a process that have ended and that it has not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state == b"Z" and int(ppid) == parent:
            found.add(int(stat.parent.name))
    return found


def test_a_run_in_a_bare_container_reaps_orphans_and_saves_on_sigterm(job: Job, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    run_dir = tmp_path / "run"
    train = job(
        rm_type=None,
        custom_rm_path="tests.e2e.rewards.leaves_an_orphan",
        actor_num_gpus_per_node=2,
        num_rollout=1000,
        save_on_sigterm=120,
        run_dir=run_dir,
    )
    read_only = [sysconfig.get_path("purelib"), str(REPOSITORY / "fuligo")]
    command = ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, "sh", "-c", BOOT, "sh", *read_only, *in_own_process(*train)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    try:
        wait_until(lambda: len(metrics(run_dir)) >= 3 or process.poll() is not None, "three steps are recorded")
        assert process.poll() is None, process.communicate()[0]
        family = descendants(process.pid)
        first = next(iter(family))
        ended = zombies(first)
        wait_until(lambda: not ended & zombies(first), "orphans that have ended are reaped", timeout_s=120)

        os.kill(first, signal.SIGTERM)
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == INTERRUPTED, said
    assert "Traceback" not in said, said
    assert f"resume after {count(len(metrics(run_dir)), 'rollout')} with: fuligo train" in said
    assert (run_dir / "checkpoints" / f"iter_{len(metrics(run_dir)):07d}").is_dir()
    assert not alive(family)
