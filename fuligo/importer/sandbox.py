"""Program that runs one bash script in namespaces of its own and reports what its stand-ins recorded.

`fuligo.importer.run` starts it as `python -I -S sandbox.py` with a job (JSON) on standard input and reads the report (JSON) from standard
output; it imports the standard library only. The script sees a root file system made of tmpfs, which holds the tools, their libraries and
the folders of the job; it has no network, no capabilities, and process ids of its own, and can execute nothing but the tools and stand-ins.
Without `sandboxed` only the limits hold.
"""

import ctypes
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

OLD_ROOT = "/.old"
POLL_SECONDS = 0.01
SETTLE_SECONDS = 3.0
"""Time that background jobs have to end after the script itself."""

MAX_FILE_BYTES = 8 << 20
MAX_RECORD_BYTES = 8 << 20
MAX_OUTPUT_BYTES = 64 << 10
"""End of the script's output that is reported."""
MAX_PROCESSES = 256
MAX_MEMORY_BYTES = 512 << 20
"""Resident memory of all processes together, and address space of each."""
TMPFS_OPTIONS = b"size=64m,nr_inodes=20k,mode=755"

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
PRIVATE = MS_NOSUID | MS_NODEV | MS_NOEXEC
"""Mount flags of all that the script may write or bring along: nothing there is executed, so no program of its own reaches the kernel."""
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38

_libc = ctypes.CDLL(None, use_errno=True)


class UnavailableError(Exception):
    """The kernel does not let this process build a sandbox."""


def main() -> None:
    """Run the job and print its report."""
    job = json.load(sys.stdin)
    try:
        with suppress(OSError):  # root's processes have no limit of their number: those of a fork bomb must not keep the supervisor waiting
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        if job["sandboxed"]:
            _unshare()
        _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
        supervisor = os.fork()  # the first process of the new PID namespace
        if supervisor == 0:
            _supervise(job)
        os.waitpid(supervisor, 0)
    except (UnavailableError, OSError) as error:
        _report({"unavailable": str(error)})


def _report(report: dict[str, Any]) -> None:
    json.dump(report, sys.stdout)
    sys.stdout.flush()


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# -- file system -----------------------------------------------------------------------------------------------------------------------


def _unshare() -> None:
    """Enter new namespaces with this user as their root."""
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    try:
        _call("unshare", flags)
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", file).write_text(text)
    except OSError as error:
        raise UnavailableError(f"user namespaces are not permitted ({error.strerror})") from None
    with suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")  # no further namespaces, hence no way to capabilities, in here


def _mount(source: str, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), kind and kind.encode(), ctypes.c_ulong(flags), options)


def _set_mount_flags(target: str, flags: int, unset: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(flags, unset, 0, 0)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def _bind(source: str, target: str, flags: int) -> None:
    """Bind-mount a file or folder of the old root."""
    old = Path(OLD_ROOT + source)
    if old.is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    _mount(str(old), target, None, MS_BIND | MS_REC)
    _set_mount_flags(target, flags)


def _show_folder(source: str, target: str, layer: str) -> None:
    """Mount a folder of the old root; what the script writes there goes into a layer on tmpfs where the kernel has overlays."""
    try:
        for name in ("upper", "work"):
            Path(layer, name).mkdir(parents=True)
        Path(target).mkdir(parents=True, exist_ok=True)
        escaped = [path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for path in (OLD_ROOT + source, layer)]
        options = f"lowerdir={escaped[0]},upperdir={escaped[1]}/upper,workdir={escaped[1]}/work,userxattr"
        _mount("overlay", target, "overlay", PRIVATE, os.fsencode(options))
    except OSError:
        _bind(source, target, PRIVATE | MS_RDONLY)


def _build_root(job: dict[str, Any]) -> None:
    """Replace the root by a tmpfs that holds the job's tools, files and folders only.

    Raises:
        UnavailableError: the kernel refuses a mount.
    """
    try:
        _mount("", "/", None, MS_REC | MS_PRIVATE)
        _mount("tmpfs", "/tmp", "tmpfs", PRIVATE, TMPFS_OPTIONS)
        Path("/tmp", OLD_ROOT.lstrip("/")).mkdir()
        os.chdir("/tmp")
        _call("pivot_root", b".", OLD_ROOT.lstrip("/").encode())
        os.chdir("/")
        for path in ("usr/bin", "proc", "dev/shm", "etc", "tmp", "run", "var"):
            Path("/", path).mkdir(parents=True)
        Path("/tmp").chmod(0o1777)
        for link in ("/bin", "/sbin", "/usr/sbin", "/usr/local/bin"):
            Path(link).parent.mkdir(parents=True, exist_ok=True)
            Path(link).symlink_to("/usr/bin")
        for number, (source, target) in enumerate(job["folders"]):
            _show_folder(source, target, f"/run/layers/{number}")
        for source, target in job["binds"]:
            _bind(source, target, MS_RDONLY | MS_NOSUID | MS_NODEV)
        for name in ("null", "zero", "full", "random", "urandom"):
            _bind(f"/dev/{name}", f"/dev/{name}", MS_RDONLY | MS_NOSUID | MS_NOEXEC)
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            Path("/dev", name).symlink_to(f"/proc/self/{target}")
        _mount("proc", "/proc", "proc", PRIVATE | MS_RDONLY)
        _call("umount2", OLD_ROOT.encode(), MNT_DETACH)
        Path(OLD_ROOT).rmdir()
        _call("sethostname", b"localhost", 9)
    except OSError as error:
        raise UnavailableError(f"the kernel refuses a mount ({error})") from None


# -- processes -------------------------------------------------------------------------------------------------------------------------


def _supervise(job: dict[str, Any]) -> NoReturn:
    """Run the script, enforce the limits, report, and end every process."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        if job["sandboxed"]:
            _build_root(job)
        for path, text in job["files"].items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
            Path(path).chmod(0o755)
            if job["sandboxed"]:
                _mount(path, path, None, MS_BIND)
                _set_mount_flags(path, MS_RDONLY, unset=MS_NOEXEC)
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
        _kill_all()
        records = _records(Path(job["state"], "records"))
        _report({
            "status": status,
            "stopped": stopped if records is not None else "records",
            "place": (_regular(Path(job["state"], "place"), 4096) or b"").decode("utf-8", "replace"),
            "output": _tail(Path(job["state"], "output")),
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
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.nice(10)
        limits = {
            resource.RLIMIT_AS: MAX_MEMORY_BYTES,
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_CPU: int(job["seconds"]) + 1,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 256,
        }
        if job["sandboxed"]:
            limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
            for capability in range(64):
                with suppress(OSError):
                    _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(job["bash"], job["argv"], job["environment"])
    except OSError as error:
        os.write(2, f"cannot start bash: {error}\n".encode())
    os._exit(126)


def _wait(script: int, seconds: float) -> tuple[int, str | None]:
    """Wait for the script and its background jobs; return its exit status, and which limit stopped it."""
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
        if _is_init() and _num_processes() > MAX_PROCESSES:  # to look at each of a fork bomb's would take too long
            return status, "processes"
        pids = _descendants()
        if len(pids) > MAX_PROCESSES:
            return status, "processes"
        if sum(map(_resident_bytes, pids)) > MAX_MEMORY_BYTES:
            return status, "memory"
        time.sleep(POLL_SECONDS)


def _descendants() -> list[int]:
    """Return the processes that the script started; orphans are among them since this process adopts them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, ())
    return found[1:]


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _is_init() -> bool:
    """Return whether this process is the first of a PID namespace, whose others are all the script's."""
    return os.getpid() == 1


def _num_processes() -> int:
    """Return the number of other processes in this PID namespace."""
    return sum(entry.name.isdecimal() for entry in Path("/proc").iterdir()) - 1


def _kill_all() -> None:
    """Kill the script's processes; in their PID namespace by one call, which none of them can outrun by forking."""
    for _ in range(200):
        if _is_init():
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        pids = _descendants()
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids:
            return
        time.sleep(0.005)


# -- report ----------------------------------------------------------------------------------------------------------------------------


def _tail(path: Path) -> str:
    data = _regular(path, MAX_FILE_BYTES) or b""
    return data[-MAX_OUTPUT_BYTES:].decode("utf-8", "replace")


def _records(folder: Path) -> dict[str, str] | None:
    """Return what the stand-ins wrote, file name -> text; None if it is more than MAX_RECORD_BYTES."""
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
    """Read a regular file of at most `limit` bytes; the script may have put anything in its place."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            if stat.S_ISREG(os.fstat(file).st_mode) and os.fstat(file).st_size <= limit:
                return opened.read(limit)
    return None


if __name__ == "__main__":
    main()
