"""Namespaces and the root file system of a sandbox.

A process calls `enter` and forks the first process of the new PID namespace, which calls `build_root`. Programs inside see a root file
system on tmpfs with only the given files and folders, have separate process ids and no network, and cannot enter further namespaces.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fuligo.sandbox.system_calls import UnavailableError, call

NOBODY = 65534
"""Id of the user and group that run programs if root starts the sandbox."""

_OLD_ROOT = "/.old"
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
PRIVATE = MS_NOSUID | MS_NODEV | MS_NOEXEC
"""Mount flags of the file systems that a program can write to; files there cannot be executed."""
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000


@dataclass(frozen=True, slots=True)
class Root:
    """Part of this machine that a sandbox shows, besides harmless devices and a /proc for its processes."""

    binds: Sequence[tuple[str, str]]
    """Pairs (file or folder on this machine, path in the sandbox), read-only."""
    folders: Sequence[tuple[str, str]] = ()
    """Pairs (folder on this machine, path in the sandbox). Writes go into a layer that is lost with the sandbox; if the kernel lacks
    overlays, the folders are read-only."""
    disk_bytes: int = 64 << 20
    """Size of the file system in memory that takes all writes."""


def enter(*, with_nobody: bool = False) -> None:
    """Move this process into new namespaces where it has all capabilities; only the processes that it forks enter the new PID namespace.

    With `with_nobody`, if this process is root and has CAP_SETUID, the sandbox has a second user, `NOBODY`, to run programs. Raises
    UnavailableError if the kernel does not let this user create namespaces.
    """
    user, group = os.geteuid(), os.getegid()
    is_mapped = _start_mapper() if with_nobody and user == 0 else None
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    try:
        call("unshare", flags)
        if is_mapped is None or not is_mapped():
            own = 0 if not with_nobody else user
            for file, text in (("setgroups", "deny"), ("uid_map", f"{own} {user} 1"), ("gid_map", f"{own} {group} 1")):
                Path("/proc/self", file).write_text(text)
    except OSError as error:
        reason = "user.max_user_namespaces is 0 or reached" if error.errno == errno.ENOSPC else error.strerror
        raise UnavailableError(f"user namespaces are not permitted ({reason})") from None
    with suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")  # no further namespaces in the sandbox, which would give capabilities


class _Mapper:
    """Process outside of the new user namespace: only such a process may map two users into it."""

    def __init__(self) -> None:
        wait, self._go = os.pipe()
        target = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._go)
            os._exit(self._map(wait, target))
        os.close(wait)

    @staticmethod
    def _map(wait: int, target: int) -> int:
        try:
            os.read(wait, 1)
            for file in ("uid_map", "gid_map"):
                Path("/proc", str(target), file).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1")
        except OSError:
            return 1
        return 0

    def __call__(self) -> bool:
        """Map user and group ids once this process has entered its user namespace; return whether that was permitted."""
        os.close(self._go)
        return os.waitpid(self._pid, 0)[1] == 0


def _start_mapper() -> _Mapper:
    with suppress(OSError):
        os.setgroups([])
    return _Mapper()


def become_program_user() -> None:
    """Become the user that runs programs in a sandbox entered `with_nobody`, if that is another user."""
    if os.geteuid() == 0 and len(Path("/proc/self/uid_map").read_text().splitlines()) > 1:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


# -- mounts ----------------------------------------------------------------------------------------------------------------------------


def build_root(root: Root) -> None:
    """Replace the root file system by a tmpfs with the contents of `root`. Raises UnavailableError if the kernel refuses a mount."""
    try:
        _mount("", "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", "/tmp", "tmpfs", PRIVATE, f"size={root.disk_bytes},nr_inodes=20k,mode=755".encode())
        Path("/tmp", _OLD_ROOT.lstrip("/")).mkdir()
        os.chdir("/tmp")
        call("pivot_root", b".", _OLD_ROOT.lstrip("/").encode())
        os.chdir("/")
        for path in ("usr/bin", "proc", "dev/shm", "etc", "tmp", "run", "var"):
            Path("/", path).mkdir(parents=True)
        for path in ("/tmp", "/dev/shm"):
            Path(path).chmod(0o1777)
        for number, (source, target) in enumerate(root.folders):
            _show_folder(source, target, f"/run/layers/{number}")
        for source, target in root.binds:
            _bind(source, target, MS_RDONLY | MS_NOSUID | MS_NODEV)
        for name in ("null", "zero", "full", "random", "urandom"):
            _bind(f"/dev/{name}", f"/dev/{name}", MS_RDONLY | MS_NOSUID | MS_NOEXEC)
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            Path("/dev", name).symlink_to(f"/proc/self/{target}")
        _mount("proc", "/proc", "proc", PRIVATE | MS_RDONLY)
        call("umount2", _OLD_ROOT.encode(), _MNT_DETACH)
        Path(_OLD_ROOT).rmdir()
        call("sethostname", b"localhost", 9)
    except OSError as error:
        raise UnavailableError(f"the kernel refuses a mount ({error})") from None


def make_read_only(path: str, *, executable: bool) -> None:
    """Make a file of the sandbox read-only for the programs in it; with `executable`, they can run it."""
    _mount(path, path, None, _MS_BIND)
    _set_mount_flags(path, MS_RDONLY, unset=MS_NOEXEC if executable else 0)


def _mount(source: str, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
    call("mount", os.fsencode(source), os.fsencode(target), kind and kind.encode(), ctypes.c_ulong(flags), options)


def _set_mount_flags(target: str, flags: int, unset: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(flags, unset, 0, 0)
    call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def _bind(source: str, target: str, flags: int) -> None:
    """Bind-mount a file or folder of the old root."""
    old = Path(_OLD_ROOT + source)
    if old.is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    _mount(str(old), target, None, _MS_BIND | _MS_REC)
    _set_mount_flags(target, flags)


def _show_folder(source: str, target: str, layer: str) -> None:
    """Mount a folder of the old root. Writes go into a layer on tmpfs; it is read-only if the kernel lacks overlays."""
    try:
        for name in ("upper", "work"):
            Path(layer, name).mkdir(parents=True)
        Path(target).mkdir(parents=True, exist_ok=True)
        escaped = [path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for path in (_OLD_ROOT + source, layer)]
        options = f"lowerdir={escaped[0]},upperdir={escaped[1]}/upper,workdir={escaped[1]}/work,userxattr"
        _mount("overlay", target, "overlay", PRIVATE, os.fsencode(options))
    except OSError:
        _bind(source, target, PRIVATE | MS_RDONLY)
