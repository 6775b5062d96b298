"""Warm start of the processes that a warm command starts: its embedded engine and its ranks.

Before a command runs, it forks a process that keeps the warm imports and has no threads. That process forks where the command would start
a fresh interpreter on one of `SERVED`. The fork becomes a child of the command, which adopts orphans for that moment, so that the command
waits for it, signals it and reads its exit code as it does with a fresh one.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

SERVED = ("fuligo", "fuligo.trainer.ranks.rank_process", "tests.e2e.train_many", "tests.e2e.warm_worker", "tests.parity.rank_driver")
"""Modules that are started with `python -m`."""
STARTING_OTHERS = (
    ["fuligo", "train"],
    ["fuligo", "launch"],
    ["fuligo", "train-many"],
    ["tests.e2e.train_many"],
    ["tests.e2e.warm_worker"],
    ["tests.parity.rank_driver"],
)
"""Modules, and commands of theirs, that start an engine and ranks."""
READ_BY_IMPORTS = ("CUDA_", "GOMP_", "HF_", "LD_", "MKL_", "OMP_", "PYTHON", "TOKENIZERS_", "TORCH", "TRANSFORMERS_")
"""Beginnings of the names of environment variables that packages read while they are imported."""
READ_BY_RAY = "RAY_"
"""Beginning of the names of variables that Ray reads, which the warm imports leave out."""
NOT_READ = {"GOMP_SPINCOUNT", "PYTHONBREAKPOINT"}
"""Variables that fuligo and Ray set in their own processes, and that no import reads."""
ROOM = "-" * 4096
"""Argument that reserves memory for the command lines of children."""
PR_SET_CHILD_SUBREAPER = 36
LARGEST_REQUEST_BYTES = 1 << 20
FIRST_FREE_DESCRIPTOR = 512
"""Descriptors are received at numbers above those that a child may need."""


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide what the warm imports do."""
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS) and name not in NOT_READ}


def read_by_tests(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide what imports of tests, commands and Ray do."""
    return {name: value for name, value in environment.items() if name.startswith((*READ_BY_IMPORTS, READ_BY_RAY))}


@contextmanager
def same_for_imports() -> Iterator[None]:
    """Restore the variables that decide what an import does, after a block that may have changed them.

    `ray.init` and other calls leave such variables behind; the commands, engines and ranks of later tests would no longer fork.
    """
    before = read_by_tests(os.environ)
    try:
        yield
    finally:
        for name in read_by_tests(os.environ).keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def fork_children_warm(module: str = "fuligo") -> str:
    """Let children of this command fork from here on; return the module in the command, and in each child the one that it runs.

    The imports were done with the present environment. Children with another one start fresh.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        return serve(theirs)
    theirs.close()
    from tests.e2e.stand_ins import ADDRESS, StandIns
    from tests.e2e.warm_servers import Servers

    children = Children(ours, read_by_imports(os.environ))
    patch_popen(children)
    patch_popen(StandIns(Servers(), children) if ADDRESS in os.environ else Servers())
    return module


class ForkServer:
    """Process from which children of this process fork while `serving`. It ends with this process.

    Args:
        connection: to a process in `serve_others`.
        environment: variables that its imports have read.
    """

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._ours = connection
        self.children = Children(connection, environment)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let children fork in this block; those whose environment changes imports start fresh."""
        fresh = subprocess.Popen._execute_child
        patch_popen(self.children)
        try:
            yield
        finally:
            subprocess.Popen._execute_child = fresh

    def close(self) -> None:
        self._ours.close()


class ForkedChildren(Protocol):
    """Children that fork from a fork server."""

    def suits(self, arguments: Any, environment: Mapping[str, str]) -> bool:
        """Return whether a fork does what a fresh process would do."""
        ...

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Return the number of the new child."""
        ...


class Children:
    """The command's end of its fork server."""

    _lock = threading.Lock()  # one for all, since a process adopts orphans for all of them or for none

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._environment = environment
        self._prctl = ctypes.CDLL(None).prctl

    def suits(self, arguments: Any, environment: Mapping[str, str]) -> bool:
        is_served = isinstance(arguments, list | tuple) and [*arguments[:2]] == [sys.executable, "-m"] and arguments[2] in SERVED
        return is_served and read_by_imports(environment) == self._environment

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                return int(self._connection.recv(16))
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def patch_popen(children: ForkedChildren) -> None:
    """Let those children of this process fork that a fork suits."""
    fresh = subprocess.Popen._execute_child

    def execute(self: subprocess.Popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid, umask, new_session, group = rest
        special = executable is not None or preexec_fn is not None or not close_fds or (gid, gids, uid, umask) != (None, None, None, -1)
        variables = dict(os.environ if env is None else env)
        if special or not children.suits(args, variables):
            fresh(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        wanted = {0: p2cread, 1: c2pwrite, 2: errwrite} | {int(number): int(number) for number in pass_fds}
        self.pid = children.start(
            {
                "command": args,
                "environment": variables,
                "directory": str(cwd or Path.cwd()),
                "descriptors": list(wanted),
                "group": group,
                "session": new_session,
                "ignores_interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            },
            [number if given == -1 else given for number, given in wanted.items()],
        )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    subprocess.Popen._execute_child = execute


def serve(connection: socket.socket) -> str:
    """Fork for every request until the command ends, whatever signals its process group gets; return in a child only."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, received, _, _ = socket.recv_fds(connection, LARGEST_REQUEST_BYTES, 64)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                break
            os.write(tell, str(pid).encode())
            os._exit(0)  # the command adopts the child
        os.waitpid(between, 0)
        pid = os.read(told, 16)
        for descriptor in (told, tell, *received):
            os.close(descriptor)
        connection.send(pid)
    for descriptor in (told, tell):
        os.close(descriptor)
    connection.close()
    return _become(json.loads(message), received)


def _become(request: dict[str, Any], received: list[int]) -> str:
    """Take over the descriptors, signals, group, environment, directory and arguments of a request; return the module to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores_interrupt"] else signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_DESCRIPTOR) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(above, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # to be read from TMPDIR again
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    _, _, module, *arguments = request["command"]
    sys.argv[1:] = arguments
    show(request["command"])
    return module


def show(command: Sequence[str]) -> None:
    """Write the command line where /proc shows it, because hooks find processes by it."""
    _write_memory(command, 45)


def show_environment() -> None:
    """Write the environment where /proc shows it, because servers are found by a mark in it."""
    _write_memory([f"{name}={value}" for name, value in sorted(os.environ.items())], 47)


def _write_memory(texts: Sequence[str], field: int) -> None:
    """Write texts between the addresses in two fields of /proc/self/stat."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[field]), int(fields[field + 1])
    data = "".join(f"{text}\0" for text in texts).encode()[: end - start - 1]
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def import_all(modules: Sequence[str]) -> None:
    """Import modules in a process that will fork.

    Raises:
        AssertionError: imports have started threads, which a fork loses, or have imported Ray.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    assert "ray" not in sys.modules, "Ray would keep the variables of this process"
    threads = sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    # The allocator of pyarrow has a thread, and handlers that stop and start it around a fork.
    assert len(threads) == 1 or threads[:-1] == ["jemalloc_bg_thd"], f"cannot fork: imports have started threads: {threads}"
    gc.freeze()  # collections in a child would copy the memory that it shares
    gc.enable()


def serve_others(connection: socket.socket) -> str:
    """Fork for every request of another process until it ends; return in a child only, the module to run."""
    module = serve(connection)
    starts_others = [module] in STARTING_OTHERS or [module, *sys.argv[1:2]] in STARTING_OTHERS
    return fork_children_warm(module) if starts_others else module
