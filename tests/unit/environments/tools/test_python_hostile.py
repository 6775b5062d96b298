"""Programs that would do harm: they run, and nothing outside of the sandbox is read, changed or left behind."""

# ruff: noqa: E501 - hostile programs in one line each

import asyncio
import os
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from fuligo.environments.tools.python import PythonResult, PythonSession, PythonSettings, shared_interpreters
from tests.unit.environments.tools.conftest import SETTINGS, SHORT

pytestmark = [pytest.mark.usefixtures("sandbox"), pytest.mark.long]

SECRET = "sk-a-secret-of-this-machine"
BRIEF = SHORT.model_copy(update={"timeout_s": 1.0})
"""Limits of programs that are stopped in any case."""


@dataclass
class Host:
    """Things of this machine that a program might reach."""

    folder: Path
    bystander: subprocess.Popen[bytes]
    listener: socket.socket
    abstract: socket.socket

    @property
    def names(self) -> dict[str, object]:
        return {
            "FILE": str(self.folder / "secret"),
            "FOLDER": str(self.folder),
            "REPOSITORY": str(Path(__file__).parents[4]),
            "PID": self.bystander.pid,
            "DRIVER": os.getpid(),
            "PORT": self.listener.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname(),
        }


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Set up what must not change, and check it afterwards."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0fuligo-test-{os.getpid()}")
    listener = socket.create_server(("127.0.0.1", 0))
    for server in (listener, abstract):
        server.listen()
        server.setblocking(False)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        yield Host(tmp_path, bystander, listener, abstract)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"secret": SECRET}
        assert bystander.poll() is None
        assert not Path("/dev/shm/1").exists()
        for server in (listener, abstract):
            with pytest.raises(BlockingIOError):
                server.accept()
        assert none_left()
    finally:
        bystander.kill()
        bystander.wait()
        listener.close()
        abstract.close()


def marked_processes() -> list[int]:
    """Return the processes of this machine, programs' included, whose name is `hostile`."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (entry / "comm").read_text().strip() == f"hostile{os.getpid()}":
                found.append(int(entry.name))
    return found


def none_left() -> bool:
    """Wait until no program is left."""
    for _ in range(3000):
        if not marked_processes():
            return True
        time.sleep(0.01)
    return False


async def run(code: str, host: Host, settings: PythonSettings = SETTINGS) -> PythonResult:
    """Run one program in a session of its own, with what it must not reach as variables."""
    session = PythonSession(settings)
    names = "\n".join(f"{name} = {value!r}" for name, value in host.names.items())
    prelude = f"import ctypes, os, socket, subprocess, sys, threading, time\nfrom pathlib import Path\n{names}\n{PRELUDE}"
    try:
        return await session.run(prelude + textwrap.dedent(code) + "\nNone")
    finally:
        session.close()


PRELUDE = f"""
ctypes.CDLL(None).prctl(15, b"hostile{os.getpid()}", 0, 0, 0)
def refused(action, *arguments):
    try:
        action(*arguments)
    except (OSError, MemoryError, ValueError) as error:
        return True
    print("DONE", action, arguments)
"""

REFUSED = {
    "reads the machine's files": """
        for path in ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.ssh", "/home", FILE, FOLDER, REPOSITORY + "/README.md", "/sys", "/dev/vda",
                     "/dev/kmsg", "/dev/mem", "/dev/vsock", "/.old", "/var/log", "/run/secrets", "/proc/kcore", "/proc/kallsyms_"]:
            refused(lambda: Path(path).read_bytes() if not Path(path).is_dir() else print("DONE", os.listdir(path)))
        """,
    "reads by a detour": """
        os.symlink(FILE, "/tmp/link"); refused(lambda: open("/tmp/link").read())
        os.symlink("/proc/1/root" + FILE, "/tmp/other"); refused(lambda: open("/tmp/other").read())
        for detour in ["/proc/1/root", "/proc/self/root/..", "/proc/1/cwd", "/proc/self/cwd/../..", "/../.."]:
            refused(lambda: open(detour + FILE).read())
        for number in range(64):
            refused(lambda: os.open(FILE.lstrip("/"), os.O_RDONLY, dir_fd=number))
        """,
    "reads other processes": """
        for pid in {PID, DRIVER, os.getppid()} - {1}:
            refused(os.kill, pid, 9)
            refused(lambda: open(f"/proc/{pid}/environ", "rb").read())
        refused(lambda: open("/proc/1/mem", "rb").read()); refused(lambda: open("/proc/1/mem", "wb"))
        refused(lambda: os.listdir("/proc/1/fd")) or refused(os.listdir, "/proc/1/map_files")
        assert sorted(name for name in os.listdir("/proc") if name.isdecimal()) == ["1", str(os.getpid())], os.listdir("/proc")
        libc = ctypes.CDLL(None, use_errno=True)
        for request in (16, 0x4206):
            if libc.ptrace(request, 1, 0, 0) != -1: print("DONE ptrace")
        """,
    "reads secrets": f"""
        everything = repr(dict(os.environ)) + open("/proc/self/environ").read() + open("/proc/self/cmdline").read()
        refused(lambda: open("/proc/1/environ").read())
        if {SECRET[:12]!r} in everything or "API_KEY" in everything: print("DONE")
        """,
    "writes": """
        for path in [FILE, FOLDER + "/hostile", "/hostile", "/usr/lib/hostile", "/lib/hostile", "/etc/passwd", os.__file__, "/dev/null/x", "/dev/hostile",
                     "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj_", "/proc/sys/user/max_user_namespaces"]:
            refused(lambda: open(path, "w").write("x"))
        for action in [os.remove, os.rmdir]: refused(action, os.__file__); refused(action, "/tmp")
        refused(os.chmod, "/dev/null", 0); refused(os.chown, "/tmp", 0, 0); refused(os.rename, "/usr", "/tmp/usr")
        refused(os.mknod, "/tmp/disk", 0o60600, os.makedev(254, 0)); refused(os.mknod, "/tmp/null", 0o20600, os.makedev(1, 3))
        """,
    "uses the network": """
        for family, address in [(2, ("127.0.0.1", PORT)), (2, ("1.1.1.1", 53)), (2, ("169.254.169.254", 80)), (10, ("::1", PORT)), (1, ABSTRACT)]:
            connection = socket.socket(family); connection.settimeout(0.2)
            refused(connection.connect, address)
            if family == 2: refused(socket.socket(2, 2).sendto, b"x", address)
        refused(socket.getaddrinfo, "example.org", 80)
        for family in (16, 17, 38, 40): refused(socket.socket, family, 3 if family != 40 else 1)
        refused(socket.socket, 2, 3)
        """,
    "asks for rights": """
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {"unshare": (0x10000000,), "setns": (3, 0), "mount": (b"x", b"/tmp", b"tmpfs", 0, 0), "umount2": (b"/proc", 2), "chroot": (b"/tmp",),
                 "setuid": (0,), "setgid": (0,), "sethostname": (b"x", 1), "setgroups": (0, 0), "reboot": (0,), "memfd_create": (b"x", 0), "shmget": (0, 4096, 0o1600)}
        for name, arguments in calls.items():
            if os.getuid() == 0 and name in ("setuid", "setgid"): continue
            if getattr(libc, name)(*arguments) != -1: print("DONE", name)
        for number in (250, 219, 321, 280, 425, 304):  # keyctl, bpf, io_uring_setup, open_by_handle_at
            if libc.syscall(number, 0, 0, 0, 0, 0) not in (-1,) and (number in (250, 321, 304)) == (os.uname().machine == "x86_64"): print("DONE", number)
        status = open("/proc/self/status").read()
        for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"):
            if int(status.split(name + ":")[1].split()[0], 16): print("DONE", name)
        if "NoNewPrivs:\\t1" not in status or "Seccomp:\\t2" not in status: print("DONE", status)
        """,
    "executes programs": """
        for path in ["/bin/sh", "/usr/bin/env", sys.executable or "/x", "/usr/bin/python3"]: refused(subprocess.run, [path, "-c", "1"])
        
        for path in {*Path("/lib64").glob("ld-*"), *Path("/lib").glob("*/ld-*")}: refused(subprocess.run, [path, "--version"])
        Path("/tmp/own").write_bytes(b"#!/usr/bin/env x"); os.chmod("/tmp/own", 0o755); refused(os.execv, "/tmp/own", ["own"])
        """,
    "has descriptors of others": """
        kinds = {number: os.readlink(f"/proc/self/fd/{number}") for number in map(int, os.listdir("/proc/self/fd")) if os.path.lexists(f"/proc/self/fd/{number}")}
        if any("socket" in kind for kind in kinds.values()) or set(kinds) - {0, 1, 2, 3, 4}: print("DONE", kinds)
        """,
    "raises its limits": """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
            refused(resource.setrlimit, kind, (1 << 40, 1 << 40))
        refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)); refused(os.nice, -5) or refused(os.nice, -20)
        """,
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED)
async def test_is_refused(code: str, host: Host):
    result = await run(code, host)
    assert (result.end, result.output) == ("ok", "")


STOPPED = {
    "an endless loop": ("while True: pass", {"cpu", "time"}),
    "an endless sleep": ("while True: time.sleep(100)", {"time"}),
    "ignored signals": ("import signal\nfor n in range(1, 32):\n  refused_ = n in (9, 19) or signal.signal(n, signal.SIG_IGN)\nwhile True: pass", {"cpu", "time"}),
    "a stopped process": ("os.kill(os.getpid(), 19)", {"time"}),
    "caught interrupts": ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", {"cpu", "time"}),
    "threads that do not end": ("for _ in range(5): threading.Thread(target=lambda: sum(0 for _ in iter(int, 1))).start()\ntime.sleep(100)", {"cpu", "time"}),
    "endless output": ("while True: print('x' * 1000)", {"output"}),
    "output without lines": ("while True: os.write(1, b'\\0' * 100000)", {"output"}),
    "output of its children": ("while os.fork() and False: pass\nwhile True: print('x' * 1000, flush=True)", {"output"}),
    "a stack overflow": ("def f(n):\n  return f(n + 1)\nsys.setrecursionlimit(10**8)\nf(0)", {"exit", "ok", "time", "cpu", "memory", "output"}),
    "a crash": ("ctypes.string_at(0)", {"exit"}),
    "os._exit": ("os._exit(3)", {"exit"}),
    "suicide": ("os.kill(os.getpid(), 9)", {"exit"}),
    "kills all": ("os.kill(-1, 9); time.sleep(100)", {"ok", "exit", "time"}),
    "kills the first process": ("for n in (2, 9, 15, 19, 23):\n  try: os.kill(1, n)\n  except OSError: pass\nos._exit(5)", {"exit"}),
    "closes its descriptors": ("os.closerange(0, 100)", {"ok", "exit"}),
}  # fmt: skip


@pytest.mark.parametrize(("code", "ends"), STOPPED.values(), ids=STOPPED)
async def test_is_stopped(code: str, ends: set[str], host: Host):
    result = await run(code, host, BRIEF if "time" in ends else SETTINGS)
    assert result.end in ends, result
    assert len(result.output) <= 2 * SETTINGS.output_bytes


BOMBS = {
    "forks": "while True:\n  try: os.fork()\n  except OSError: pass",
    "forks in new sessions": "while True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass",
    "forks that wait": "while True:\n  try:\n    if os.fork() == 0: time.sleep(1000)\n  except OSError: break\ntime.sleep(1000)",
    "threads": "while True:\n  try: threading.Thread(target=time.sleep, args=(100,)).start()\n  except RuntimeError: break\ntime.sleep(1000)",
    "memory": "held = []\nwhile True:\n  try: held.append(bytearray(1 << 20))\n  except MemoryError: time.sleep(0.01)",
    "memory of children": "for _ in range(10):\n  if os.fork() == 0: break\nheld = [bytearray(1 << 20) for _ in range(90)]\ntime.sleep(100)",
    "shared memory": "import mmap\nheld = []\nwhile True:\n  try:\n    m = mmap.mmap(-1, 1 << 22); m.write(b'x' * (1 << 22)); held.append(m)\n  except (OSError, MemoryError): time.sleep(0.01)",
    "a big number": "print(len(str(9 ** (9 ** 9))))",
    "the disk": "n = 0\nwhile True:\n  n += 1\n  try: Path(f'/tmp/{n}').write_bytes(b'x' * (1 << 20))\n  except OSError: time.sleep(0.01)",
    "the disk of shared memory": "n = 0\nwhile True:\n  n += 1\n  try: Path(f'/dev/shm/{n}').write_bytes(b'x' * (1 << 20))\n  except OSError: time.sleep(0.01)",
    "many files": "n = 0\nwhile True:\n  n += 1\n  try: Path(f'/tmp/{n}').touch()\n  except OSError: time.sleep(0.01)",
    "descriptors": "held = []\nwhile True:\n  try: held.append(os.pipe())\n  except OSError: time.sleep(0.01)",
}  # fmt: skip


@pytest.mark.parametrize("code", BOMBS.values(), ids=BOMBS)
async def test_bomb_ends(code: str, host: Host):
    """The program ends by a limit, and the next session works."""
    result = await run(code, host, BRIEF)
    assert result.end in {"time", "cpu", "memory", "processes", "exit"}, result
    assert (await run("print(1)", host)).output == "1\n"


async def test_nothing_runs_between_the_calls_of_a_session(host: Host):
    session = PythonSession(SETTINGS)
    start = """
import os, threading, time
n = 0
def count():
    global n
    while True:
        n += 1
        time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
child = os.fork()
while child == 0: time.sleep(1)
import random
"""
    try:
        assert (await session.run(start)).keeps_variables
        before = int((await session.run("n")).output)
        await asyncio.sleep(1.0)
        after = int((await session.run("n")).output)
        assert after - before < 100  # a thread that ran between the calls would have counted to several hundred
        assert (await session.run("os.waitpid(child, 0)[1]")).output == "9\n"
    finally:
        session.close()


async def test_sessions_do_not_see_each_other(host: Host):
    one, other = PythonSession(SETTINGS), PythonSession(SETTINGS)
    try:
        await one.run("x = 1; open('/tmp/mine', 'w').write('x'); import os; os.environ['MINE'] = '1'")
        result = await other.run("import os; print('x' in globals(), os.listdir('/tmp'), 'MINE' in os.environ, os.listdir('/dev/shm'))")
        assert result.output == "False [] False []\n"
    finally:
        one.close()
        other.close()


async def test_a_closed_session_leaves_no_process(host: Host):
    session = PythonSession(SETTINGS)
    prelude = f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'hostile{os.getpid()}', 0, 0, 0)\n"
    assert (await session.run(prelude)).end == "ok"
    assert marked_processes()
    session.close()
    await asyncio.sleep(0)
    assert none_left()
    process = shared_interpreters(SETTINGS)._process
    assert process is not None
    assert process.poll() is None
