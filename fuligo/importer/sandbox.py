"""Program that runs one bash script in its own namespaces and reports what its stand-ins recorded.

`fuligo.importer.run` starts it with a job (JSON) on standard input and reads the report (JSON) from standard output; it imports the
standard library and `fuligo.sandbox` only. The script sees a root file system made of tmpfs, which holds the tools, their libraries and
the folders of the job; it has no network, no capabilities, and its own process ids, and can execute only the tools and stand-ins.
Without `sandboxed` only the limits apply.
"""

import json
import os
import resource
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fuligo.sandbox.namespaces import Root, build_root, enter, make_read_only
from fuligo.sandbox.processes import descendants, end_all, is_init, num_others, run_first, run_last, set_limits
from fuligo.sandbox.system_calls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    UnavailableError,
    drop_capabilities,
    forbid_capabilities,
    prctl,
)

POLL_SECONDS = 0.01
SETTLE_SECONDS = 3.0
"""Seconds for background jobs to end after the script itself; then they are killed."""

MAX_FILE_BYTES = 8 << 20
MAX_RECORD_BYTES = 8 << 20
MAX_OUTPUT_BYTES = 64 << 10
"""Number of bytes of the script's output that are reported, counted from its end."""
MAX_PROCESSES = 256
MAX_MEMORY_BYTES = 512 << 20
"""Limit of the resident memory of all processes together, and of the address space of each."""


def main() -> None:
    """Run the job and print its report."""
    job = json.load(sys.stdin)
    try:
        run_first()  # RLIMIT_NPROC does not bind root: a fork bomb must not keep the supervisor from running
        if job["sandboxed"]:
            enter()
        prctl(PR_SET_DUMPABLE, 0)
        supervisor = os.fork()  # the first process of the new PID namespace
        if supervisor == 0:
            _supervise(job)
        os.waitpid(supervisor, 0)
    except (UnavailableError, OSError) as error:
        _report({"unavailable": str(error)})


def _report(report: dict[str, Any]) -> None:
    json.dump(report, sys.stdout)
    sys.stdout.flush()


# -- processes -------------------------------------------------------------------------------------------------------------------------


def _supervise(job: dict[str, Any]) -> NoReturn:
    """Run the script, enforce the limits, report, and end every process."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        if job["sandboxed"]:
            build_root(Root(job["binds"], job["folders"]))
        for path, text in job["files"].items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
            Path(path).chmod(0o755)
            if job["sandboxed"]:
                make_read_only(path, executable=True)
        for path, target in job["links"].items():
            with suppress(OSError):  # a folder of the script may be read-only
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).unlink(missing_ok=True)
                Path(path).symlink_to(target)
        Path(job["state"], "records").mkdir(parents=True)
        for folder in (job["directory"], job["environment"]["HOME"]):
            Path(folder).mkdir(parents=True, exist_ok=True)
        script = os.fork()
        if script == 0:
            _start(job)
        status, stopped = _wait(script, job["seconds"])
        end_all()
        records = _records(Path(job["state"], "records"))
        data = _regular(Path(job["state"], "output"), MAX_FILE_BYTES) or b""
        _report({
            "status": status,
            "stopped": stopped if records is not None else "records",
            "place": (_regular(Path(job["state"], "place"), 4096) or b"").decode("utf-8", "replace"),
            "output": data[-MAX_OUTPUT_BYTES:].decode("utf-8", "replace"),
            "records": records or {},
        })  # fmt: skip
    except (UnavailableError, OSError) as error:
        _report({"unavailable": str(error)})
    os._exit(0)


def _start(job: dict[str, Any]) -> NoReturn:
    """Replace this process by bash, in its own session, with the limits and without capabilities."""
    try:
        os.setsid()
        output = os.open(Path(job["state"], "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 1024)
        os.chdir(job["directory"])
        os.umask(0o022)
        run_last()
        limits = {
            resource.RLIMIT_AS: MAX_MEMORY_BYTES,
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_CPU: int(job["seconds"]) + 1,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 256,
        }
        if job["sandboxed"]:
            limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
            forbid_capabilities()
            drop_capabilities()
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        set_limits(limits)
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(job["bash"], job["argv"], job["environment"])
    except OSError as error:
        os.write(2, f"cannot start bash: {error}\n".encode())
    os._exit(126)


def _wait(script: int, seconds: float) -> tuple[int, str | None]:
    """Wait for the script and its background jobs; return its exit status, and the limit that stopped it (None if none did)."""
    status = 0
    deadline = time.monotonic() + seconds
    settle: float | None = None
    while True:
        while True:
            try:
                pid, result = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status, None
            if pid == 0:
                break
            if pid == script:
                status, settle = os.waitstatus_to_exitcode(result), time.monotonic() + SETTLE_SECONDS
        if settle is not None and time.monotonic() > min(settle, deadline):
            return status, None
        if settle is None and time.monotonic() > deadline:
            return status, "time"
        if is_init() and num_others() > MAX_PROCESSES:  # inspecting each process of a fork bomb would take too long
            return status, "processes"
        processes = descendants()
        if len(processes) > MAX_PROCESSES:
            return status, "processes"
        if sum(process.resident_bytes for process in processes) > MAX_MEMORY_BYTES:
            return status, "memory"
        time.sleep(POLL_SECONDS)


# -- report ----------------------------------------------------------------------------------------------------------------------------


def _records(folder: Path) -> dict[str, str] | None:
    """Return the text of each file that the stand-ins wrote, by file name; None if they exceed MAX_RECORD_BYTES together."""
    found: dict[str, str] = {}
    left = MAX_RECORD_BYTES
    for record in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []:
        data = _regular(record, MAX_FILE_BYTES) or b""
        left -= len(data) + len(record.name)
        if left < 0:
            return None
        found[record.name] = data.decode("utf-8", "surrogateescape")
    return found


def _regular(path: Path, limit: int) -> bytes | None:
    """Return the content of a regular file of at most `limit` bytes; None if it is anything else, since the script may have replaced it."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            if stat.S_ISREG(os.fstat(file).st_mode) and os.fstat(file).st_size <= limit:
                return opened.read(limit)
    return None
