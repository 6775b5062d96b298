"""Guard process that cleans up after a command: `python -I guard.py GRACE_S COMMAND ...`.

Inference servers start further processes and stop them only if they end normally. The guard starts the command in a session of its own,
adopts every orphan below it, and ends them all when the command ends, on SIGTERM, or when the guard's standard input closes, which happens
whenever its parent dies. It also removes their files in shared memory: torch and multiprocessing leave that to helper processes, which are
killed too. If the guard itself is killed, the kernel kills the command; `engines.server_process` finds what else is left.

Imports only the standard library, since it starts with the environment of its command.
"""

import ctypes
import json
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Literal

POLL_S = 0.05
LOOK_S = 2.0
"""Seconds between listings of shared files. They are listed in advance, since all processes may end soon after the first is killed."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl(2): a signal to this process when its parent ends; orphans below this process become its children."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
SHORTEST_SECRET = 4
_HIDDEN = "FULIGO_GUARD_HIDES"
"""Environment variable with the texts to hide, as JSON; read by the guard and not passed to its command."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_BY_A_FAMILY = ("sem.mp-", "sglang_loads_", "sgl_shm_")
"""Prefixes of shared files that only one server's processes use: multiprocessing's locks, SGLang's load reports, and its messages between
ranks (SGLang 0.5.15 removes those of killed processes only in CI, `utils/stale_shm_cleanup.py`)."""


def main(command: Sequence[str], grace_s: float) -> int:
    """Run the command until it ends or the guard is told to stop; return its exit code, or 128 + the signal that ended it.

    `grace_s`: time between SIGTERM and SIGKILL.
    """
    # Become the parent of orphans below this process; on systems other than Linux, only the process group is ended.
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    secrets = json.loads(os.environ.pop(_HIDDEN, "[]"))
    output, errors = (subprocess.PIPE, subprocess.STDOUT) if secrets else (None, None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        preexec_fn=partial(_end_with, os.getpid()),  # noqa: PLW1509  # the guard still has one thread
    )
    copying = threading.Thread(target=_copy_without, args=(child.stdout, [secret.encode() for secret in secrets]), daemon=True)
    if secrets:
        copying.start()
    shared: set[Path] = set()
    next_look = time.monotonic() + LOOK_S
    while child.poll() is None and not asked_to_stop and not _parent_has_ended():
        if time.monotonic() > next_look:
            shared.update(_shared_files(_descendants(os.getpid())))
            next_look = time.monotonic() + LOOK_S
    shared.update(_shared_files(_descendants(os.getpid())))
    code = _end(child, grace_s)
    if secrets:
        copying.join(timeout=grace_s)  # the last lines may say why the command ended
    _remove(shared)
    return code if code >= 0 else 128 - code


def hiding(secrets: Sequence[str]) -> dict[str, str]:
    """Return the environment that makes a guard replace these texts in the command's output; texts under 4 characters are ignored."""
    texts = sorted({secret for secret in secrets if len(secret) >= SHORTEST_SECRET}, key=len, reverse=True)
    return {_HIDDEN: json.dumps(texts)} if texts else {}


def _copy_without(output: IO[bytes], secrets: Sequence[bytes]) -> None:
    """Copy lines to standard output, with secrets replaced by `***`."""
    for line in output:
        for secret in secrets:
            line = line.replace(secret, b"***")  # noqa: PLW2901
        os.write(sys.stdout.fileno(), line)


def _end_with(guard: int) -> None:
    """Make the kernel kill the command when the guard ends; called in the command's process before exec."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:  # the guard ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def _parent_has_ended() -> bool:
    """Wait up to `POLL_S` and return whether standard input, to which nothing is written, has closed."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """End the command's process group and all adopted processes; return the command's exit code."""
    family = {child.pid, *_descendants(os.getpid())}
    _signal_all(child.pid, signal.SIGTERM)
    if not _wait_for_end(child, grace_s):
        family.update(_descendants(os.getpid()))
        _wait_for_end(child, grace_s, force=True)
    code = child.wait()
    # Torch's shared files have the id of their process in their names.
    _remove([file for file in SHARED_MEMORY.glob("torch_*_*") if file.name.split("_")[1] in map(str, family)])
    return code


def _remove(files: Iterable[Path]) -> None:
    """Delete the files that belong to this user, since other users may create files with such names."""
    for file in files:
        with suppress(OSError):
            status = file.lstat()
            if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
                file.unlink()


def _wait_for_end(child: subprocess.Popen[bytes], timeout_s: float, *, force: bool = False) -> bool:
    """Wait up to `timeout_s` until the command's group and every orphan have ended; return whether they have.

    With `force`, send SIGKILL to all of them while waiting.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if force:
            _signal_all(child.pid, signal.SIGKILL)  # repeatedly, because orphans appear when their parents end
        child.poll()
        _reap(child.pid)
        if child.returncode is not None and not _group_exists(child.pid) and not _children():
            return True
        time.sleep(POLL_S)
    return False


def _shared_files(family: Iterable[int]) -> list[Path]:
    """Return the shared files that these processes have mapped; matched by inode, since glibc renames semaphores after mapping them."""
    inodes = {inode for pid in family for inode in _mapped_inodes(pid)}
    found: list[Path] = []
    for file in SHARED_MEMORY.glob("*"):
        with suppress(FileNotFoundError):
            # lstat, since another user's link may point to a disk that does not answer
            if file.name.startswith(SHARED_BY_A_FAMILY) and file.lstat().st_ino in inodes:
                found.append(file)
    return found


def _mapped_inodes(pid: int) -> Iterator[int]:
    """Yield the inodes of files in shared memory that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    yield from (int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line)


def _signal_all(group: int, number: int) -> None:
    for send, target in ((os.killpg, group), *((os.kill, pid) for pid in _children())):
        try:
            send(target, number)
        except ProcessLookupError:
            continue


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(command_pid: int) -> None:
    """Collect the exit codes of adopted processes, except the command's, which its Popen collects."""
    for pid in _children():
        if pid != command_pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(parent: int | Literal["self"] = "self") -> list[int]:
    """Return the children of a process (default: this one), including adopted ones; empty without /proc."""
    found: list[int] = []
    tasks = Path(f"/proc/{parent}/task")
    with suppress(OSError):  # the process may end at any moment, and its threads one by one
        for thread in tasks.iterdir():
            with suppress(OSError):
                found += [int(pid) for pid in (thread / "children").read_text().split()]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], float(sys.argv[1])))
