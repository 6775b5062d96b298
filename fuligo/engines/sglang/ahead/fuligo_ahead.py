"""Scheduler and detokenizer processes of SGLang 0.5.15 that import SGLang while its main process does.

SGLang starts these processes with multiprocessing's `spawn` when its main process has imported SGLang; each then imports it again. `start`
starts them when the main process starts, as its children. Where SGLang would spawn one, it gets what a spawned process gets: descriptors,
environment, and the pickled process. A process that cannot continue with that, because its imports would have read another environment,
executes what SGLang would have spawned, under the same pid. They are not forked: imports may have initialized CUDA.

Imports only the standard library, since it runs before all imports of an engine.
"""

import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

VARIABLE = "FULIGO_AHEAD"
"""Environment variable with the modules to import, one for each process, separated by spaces; empty: start none."""
PROGRAM = """
import sys
sys.path.insert(0, {directory!r})
import fuligo_ahead
del sys.path[0]
fuligo_ahead.wait({sock}, {parent_pid}, {module!r})
"""
ALWAYS_SET = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "AUTO"}
SET_IF_UNSET = {"TRTLLM_ENABLE_PDL": "1", "CUTE_DSL_LOG_LEVEL": "30", "CUTE_DSL_LOG_TO_CONSOLE": "1"}
"""Variables that SGLang's main process sets before it spawns; if it sets other values, a process that has read them is started anew."""
LIMITS = {resource.RLIMIT_NOFILE: 65535, resource.RLIMIT_STACK: 65535 * 1024}
"""Soft limits below these values are raised by SGLang's main process before it spawns; processes that it spawns inherit them."""
READ_OUTSIDE_PYTHON = ("CUDA_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NVIDIA_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_")
"""Prefixes of variables that libraries read when they are loaded, which Python does not see."""
FIRST_DESCRIPTOR = 512
"""Lowest number of a descriptor that is handed over: under the same number it must be free in the process that receives it."""
UNUSED_S = 600.0
"""Seconds after which a process that SGLang has not used ends."""
PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("!Q")

_ahead: list["_Process"] = []


class _Process:
    """Child process that imports a module, seen from its parent."""

    def __init__(self, module: str) -> None:
        self.module = module
        executable = os.fsencode(spawn.get_executable())
        self.socket, theirs = socket.socketpair()
        program = PROGRAM.format(directory=str(Path(__file__).parent), sock=theirs.fileno(), parent_pid=os.getpid(), module=module)
        command = [executable, *subprocess._args_from_interpreter_flags(), "-c", program, "--multiprocessing-fork"]  # pyrefly: ignore[missing-attribute]
        with theirs:
            self.pid = util.spawnv_passfds(executable, command, [theirs.fileno()])

    def hand_over(self, descriptors: Sequence[int]) -> None:
        """Send this process's environment and the descriptors. Raises OSError if the process has ended.

        The last two descriptors are the resource tracker's and that of the pipe with the pickled process.
        """
        message = {"environment": dict(os.environ), "executable": os.fsdecode(spawn.get_executable()), "descriptors": list(descriptors)}
        data = json.dumps(message).encode()
        with self.socket:
            socket.send_fds(self.socket, [_HEADER.pack(len(data))], descriptors)
            self.socket.sendall(data)


class _Popen(popen_spawn_posix.Popen):
    """Spawned process that is started anew only if none that imported its module has been started ahead."""

    _moved: ExitStack | None = None

    def duplicate_for_child(self, fd: int) -> int:
        """Return the number of a descriptor in the child."""
        if self._moved is None:
            return super().duplicate_for_child(fd)
        self._fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR))
        self._moved.callback(os.close, self._fds[-1])
        return self._fds[-1]

    def _launch(self, process_obj: Any) -> None:
        module = getattr(process_obj._target, "__module__", None)
        if (found := next((process for process in _ahead if process.module == module), None)) is not None:
            _ahead.remove(found)
            try:
                self._continue(found, process_obj)
            except OSError as error:
                _say(f"cannot use the process {found.pid} that has imported {module}: {error}; starting another")
                self._fds = []
            else:
                return
        super()._launch(process_obj)  # pyrefly: ignore[missing-attribute]

    def _continue(self, process: _Process, process_obj: Any) -> None:
        """Have `process` run `process_obj`. Raises OSError if the process has ended."""
        preparation = spawn.get_preparation_data(process_obj._name)
        pickled = io.BytesIO()
        with ExitStack() as moved:
            self._moved = moved
            set_spawning_popen(self)
            try:
                reduction.dump(preparation, pickled)
                reduction.dump(process_obj, pickled)
                with ExitStack() as ours:
                    self.sentinel, ended = os.pipe()  # readable when the child, which keeps the other end, has ended
                    ours.callback(os.close, self.sentinel)
                    child_reads, parent_writes = os.pipe()
                    ours.callback(os.close, parent_writes)
                    for descriptor in (ended, child_reads):
                        moved.callback(os.close, descriptor)
                    tracker = resource_tracker.getfd()
                    assert tracker is not None, "getfd starts the tracker"
                    # The tracker's is not handed over earlier: at its exit, Python waits until all processes that have it have ended.
                    for descriptor in (ended, tracker, child_reads):
                        self.duplicate_for_child(descriptor)
                    process.hand_over(self._fds)
                    with open(parent_writes, "wb", closefd=False) as pipe:
                        pipe.write(pickled.getbuffer())
                    ours.pop_all()
            finally:
                set_spawning_popen(None)
                self._moved = None
        self.pid = process.pid
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, parent_writes))  # pyrefly: ignore[missing-attribute]


def start() -> None:
    """Start the processes of `$FULIGO_AHEAD` and have multiprocessing use them; call it in the main process, before its imports."""
    modules = os.environ.pop(VARIABLE, "").split()
    if not modules:
        return
    try:
        _raise_limits()
        saver = _memory_saver() if "--enable-memory-saver" in sys.argv else {}
        with _set({name: value for name, value in SET_IF_UNSET.items() if name not in os.environ} | ALWAYS_SET):
            for module in modules:
                with _set(saver if module.endswith(".scheduler") else {}):
                    _ahead.append(_Process(module))
    except Exception as error:  # the engine starts without them, only later
        _say(f"cannot start SGLang's processes ahead: {type(error).__name__}: {error}; SGLang will start them itself")
    popen_spawn_posix.Popen = _Popen


def wait(sock: int, parent_pid: int, module: str) -> None:
    """Import `module`, wait until SGLang would spawn its process, and then run that process's work here. `sock`: socket to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        sys.exit()
    before, problem = dict(os.environ), None
    gc.disable()  # imports free next to nothing, and scanning their objects takes a quarter of their time
    with _recorded_reads() as read:
        try:
            importlib.import_module("sglang.launch_server")
            importlib.import_module(module)
        except Exception as error:  # a spawned process reports it
            problem = f"{module} cannot be imported before the arguments are known ({error})"
    gc.freeze()  # they are left out of later collections as well
    gc.enable()
    with socket.socket(fileno=sock) as parent:
        if not select.select([parent], [], [], UNUSED_S)[0]:
            sys.exit()
        header, received, _, _ = socket.recv_fds(parent, _HEADER.size, 253)
        if not header:  # the main process has ended
            sys.exit()
        with parent.makefile("rb") as file:
            message = json.loads(file.read(_HEADER.unpack(header)[0]))
    now, numbers = message["environment"], message["descriptors"]
    problem = problem or _reason_to_start_anew(before, now, read)
    if message["executable"] != os.fsdecode(spawn.get_executable()):
        problem = f"SGLang starts this process with {message['executable']}"
    if problem is None and any(map(_is_open, numbers)):
        problem = "its descriptors are in use"
    for descriptor, number in zip(received, numbers):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    *_, tracker, pipe = numbers
    if problem is not None:
        _say(f"starting the process of {module} anew: {problem}")
        command = [message["executable"], *spawn.get_command_line(tracker_fd=tracker, pipe_handle=pipe)[1:]]
        os.execve(command[0], command, now)
    for name in before.keys() - now.keys():
        os.environ.pop(name, None)
    os.environ.update(now)
    for number in numbers:
        os.set_inheritable(number, False)
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)


def _reason_to_start_anew(before: Mapping[str, str], now: Mapping[str, str], read: set[str]) -> str | None:
    """Return why the imports might have had another result in the environment `now`; None if they would have had the same."""
    changed = {name for name in before.keys() | now.keys() if now.get(name) not in (before.get(name), os.environ.get(name))}
    if not before.get("LD_PRELOAD") and not now.get("LD_PRELOAD"):  # torch_memory_saver, which SGLang uses, may leave it empty or unset
        changed.discard("LD_PRELOAD")
    differ = sorted(name for name in changed if name in read or name.startswith(READ_OUTSIDE_PYTHON))
    return f"its imports have read other values of {', '.join(differ)}" if differ else None


@contextmanager
def _recorded_reads() -> Iterator[set[str]]:
    """Yield a set that collects the names of the environment variables that Python code reads during the block."""
    environment: Any = type(os.environ)
    get, read = environment.__getitem__, set()

    def recorded(self: Any, name: str) -> str:
        read.add(name)
        return get(self, name)

    environment.__getitem__ = recorded
    try:
        yield read
    finally:
        environment.__getitem__ = get


def _raise_limits() -> None:
    """Raise this process's limits as SGLang will (`set_ulimit`), so that the processes start with them.

    A limit of the stack counts only when a process starts: it is the size of its threads' stacks.
    """
    for limit, target in LIMITS.items():
        soft, hard = resource.getrlimit(limit)
        if soft < target:
            with suppress(ValueError):  # higher than the hard limit
                resource.setrlimit(limit, (target, hard))


def _memory_saver() -> dict[str, str]:
    """Return the variables with which `torch_memory_saver.configure_subprocess` starts processes, without importing torch.

    If they differ from SGLang's, or are not found, the scheduler is started anew.
    """
    saver, torch = (importlib.util.find_spec(name) for name in ("torch_memory_saver", "torch"))
    if saver is None or saver.origin is None or torch is None or torch.origin is None:
        return {}
    cuda = runpy.run_path(str(Path(torch.origin).parent / "version.py")).get("cuda") or ""
    pattern = f"torch_memory_saver_hook_mode_preload_cu{cuda.partition('.')[0]}.*.so"
    package = Path(saver.origin).parent
    found = [*package.glob(pattern)] or [*package.parent.glob(pattern)]
    return {"LD_PRELOAD": ":".join(filter(None, (str(found[0]), os.environ.get("LD_PRELOAD"))))} if len(found) == 1 else {}


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the block, then restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _is_open(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    print(f"fuligo: {text}", flush=True)
