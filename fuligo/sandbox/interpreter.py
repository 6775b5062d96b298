"""Program that runs Python interpreters in sandboxes, one for each session socket that it receives.

`fuligo.environments.tools.python` starts it (`fuligo.sandbox.processes.command`) with a socket as standard input. It imports the standard
library, `fuligo.sandbox` and the modules that its settings name, then forks for every session: the child enters new namespaces and forks
their first process, the supervisor, which builds the root file system and forks the interpreter. No new program is executed, so a session
starts in milliseconds with its modules imported. The supervisor enforces the limits; the interpreter has only the descriptors of its pipes.
"""

import ast
import gc
import importlib
import io
import json
import linecache
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from fuligo.sandbox.namespaces import Root, become_program_user, build_root, enter
from fuligo.sandbox.processes import descendants, end_all, end_others, num_others, run_first, run_last, set_limits
from fuligo.sandbox.system_calls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    UnavailableError,
    drop_capabilities,
    filter_system_calls,
    forbid_capabilities,
    prctl,
)

_NAME = "<program>"
_RECURSION_LIMIT = 1000


def run_cells(requests: int, done: int) -> None:
    """Run the programs that arrive on the pipe `requests`, and write a byte to the pipe `done` after each, until `requests` closes."""
    random.seed(0)  # so that the same program prints the same output
    os.environ.clear()
    os.environ.update(HOME="/tmp", TMPDIR="/tmp", LANG="C.UTF-8", USER="nobody", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    sys.argv = [_NAME]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    with os.fdopen(requests, "rb") as programs:
        while size := programs.read(8):
            code = programs.read(int.from_bytes(size, "little")).decode("utf-8", "surrogatepass")
            _run(code, module.__dict__)
            os.write(done, b".")


def _run(code: str, scope: dict[str, Any]) -> None:
    """Run a program; print the value of an expression at its end, or the traceback of an exception."""
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    try:
        linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
        statements, expression = _compile(code)
        exec(statements, scope)
        if expression is not None and (value := eval(expression, scope)) is not None:
            print(repr(value))
    except SystemExit as end:
        if end.code not in {None, 0}:
            print(f"SystemExit: {end.code}")
    except BaseException as error:
        _print_exception(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the program may have replaced the stream by anything
                continue


def _stream(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


def _compile(code: str) -> tuple[CodeType, CodeType | None]:
    """Return the compiled program without an expression at its end, and that expression (None if there is none)."""
    tree = ast.parse(code, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    expression = compile(ast.Expression(last.value), _NAME, "eval") if isinstance(last, ast.Expr) else None
    return compile(tree, _NAME, "exec"), expression


def _print_exception(error: BaseException) -> None:
    """Print a traceback that begins in the program."""
    start: TracebackType | None = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename != _NAME:
        start = start.tb_next
    try:
        traceback.print_exception(type(error), error, start)
    except BaseException as broken:  # the program's exception cannot be printed, or there is no memory
        os.write(2, f"{type(error).__name__} (and {type(broken).__name__} while it was printed)\n".encode())


_POLL_S = 0.02
_MAX_OPEN_FILES = 64
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program, and the files and modules that it can use."""

    timeout_s: float
    cpu_s: float
    """CPU time of one call, over all processes."""
    memory_bytes: int
    """Limit on the memory of all processes together, and on the address space of each, in addition to a fresh interpreter's."""
    disk_bytes: int
    output_bytes: int
    max_processes: int
    max_running: int
    """Limit on the programs that run at once, over all sessions."""
    binds: tuple[tuple[str, str], ...]
    """Pairs (path on this machine, path in the sandbox)."""
    paths: tuple[str, ...]
    """Folders of packages, for sys.path."""
    modules: tuple[str, ...]
    """Modules to import before the first session."""


def main() -> None:
    """Serve sessions until the socket closes."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    limits = Limits(**json.loads(control.recv(_CHUNK_BYTES)))
    sys.path += limits.paths
    for module in limits.modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            control.send(json.dumps({"problem": f"import {module}: {type(error).__name__}: {error}"}).encode())
            return
    control.send(b"{}")
    running = _Running(limits.max_running)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel reaps the sessions
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # so that collections in the sessions do not copy the pages of these objects
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        (session,) = received
        if os.fork() == 0:
            control.close()
            _begin(socket.socket(fileno=session), limits, running)
        os.close(session)


def _begin(session: socket.socket, limits: Limits, running: "_Running") -> NoReturn:
    """Enter the namespaces and fork the supervisor."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_first()
        enter(with_nobody=True)
        prctl(PR_SET_DUMPABLE, 0)
        if os.fork() == 0:
            _Supervisor(session, limits, running).serve()
    except (UnavailableError, OSError) as error:
        _answer(session, {"unavailable": str(error)})
    os._exit(0)


def _answer(session: socket.socket, report: dict[str, Any]) -> None:
    session.sendall(json.dumps(report).encode() + b"\n")


class _Running:
    """Semaphore that limits how many programs run at once, shared by all forks: a pipe with one byte for each free place."""

    def __init__(self, count: int) -> None:
        self._free, self._freed = os.pipe()
        os.set_blocking(self._free, False)
        os.write(self._freed, b"." * min(count, select.PIPE_BUF))

    def begin(self, session: socket.socket) -> bool:
        """Wait until a program may run and return True; return False if the session closed."""
        poll = select.poll()
        for descriptor in (session.fileno(), self._free):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if session.fileno() in ready:
                return False
            with suppress(BlockingIOError):  # another session was faster
                os.read(self._free, 1)
                return True

    def end(self) -> None:
        os.write(self._freed, b".")


@dataclass(slots=True)
class _Supervisor:
    """First process of a session's PID namespace: when it ends, the kernel kills all others in the namespace."""

    session: socket.socket
    limits: Limits
    running: _Running
    _interpreter: "_Interpreter | None" = None

    def serve(self) -> NoReturn:
        """Run programs until the session closes."""
        try:
            build_root(Root(self.limits.binds, disk_bytes=self.limits.disk_bytes))
            for line in self.session.makefile("rb"):
                if not self.running.begin(self.session):
                    break
                try:
                    _answer(self.session, {"started": True})
                    report = self._run(json.loads(line)["code"])
                finally:
                    self.running.end()
                if report is None:
                    break
                _answer(self.session, report)
        except (UnavailableError, OSError) as error:
            with suppress(OSError):
                _answer(self.session, {"unavailable": str(error)})
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    def _run(self, code: str) -> dict[str, Any] | None:
        """Run a program in the session's interpreter, a new one if there is none; return the report, None if the session closed."""
        interpreter = self._interpreter or _Interpreter(self.limits)
        call = _Call(interpreter, self.limits)
        ended = call.run(code, self.session)
        if ended == "closed":
            return None
        if ended == "ok" and end_others(interpreter.pid):
            os.kill(interpreter.pid, signal.SIGSTOP)  # so that its threads do not run between calls
            self._interpreter = interpreter
        else:
            end_all()
            self._interpreter = None
        call.drain()
        if self._interpreter is None:
            interpreter.close()
        return {"output": call.output.decode("utf-8", "replace"), "ended": ended, "kept": self._interpreter is not None}


class _Interpreter:
    """Interpreter of a session, and the pipes to it."""

    def __init__(self, limits: Limits) -> None:
        requests, self.requests = os.pipe()
        self.done, done = os.pipe()
        self.output, output = os.pipe()
        self.base_bytes = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()  # noqa: SIM115, PTH123 - faster
        self.pid = os.fork()
        if self.pid == 0:
            _become_interpreter(requests, done, output, limits)
        self.exited = os.pidfd_open(self.pid)
        for descriptor in (requests, done, output):
            os.close(descriptor)
        os.set_blocking(self.output, False)
        os.set_blocking(self.requests, False)
        self._unread = b""

    def start(self, code: str) -> None:
        """Wake the interpreter and queue a program for it."""
        os.kill(self.pid, signal.SIGCONT)
        data = code.encode("utf-8", "surrogatepass")
        self._unread += len(data).to_bytes(8, "little") + data

    def hand_over(self) -> bool:
        """Write as much of the program as the pipe takes; return whether any is left.

        An earlier program may have filled or closed the pipe.
        """
        try:
            self._unread = self._unread[os.write(self.requests, self._unread) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unread = b""
        return bool(self._unread)

    def close(self) -> None:
        """Close the pipes of an interpreter that ended."""
        for descriptor in (self.requests, self.done, self.output, self.exited):
            os.close(descriptor)


class _Call:
    """One program while it runs."""

    def __init__(self, interpreter: _Interpreter, limits: Limits) -> None:
        self.output = bytearray()
        self._interpreter = interpreter
        self._limits = limits
        self._is_full = False

    def run(self, code: str, session: socket.socket) -> str:
        """Run a program to its end; return `ok`, `exit STATUS`, the limit that it exceeded, or `closed` if the session closed."""
        interpreter, limits = self._interpreter, self._limits
        deadline = time.monotonic() + limits.timeout_s
        cpu_s = sum(process.cpu_s for process in descendants())
        poll = select.poll()
        for descriptor in (interpreter.output, interpreter.done, interpreter.exited, session.fileno()):
            poll.register(descriptor, select.POLLIN)
        interpreter.start(code)
        poll.register(interpreter.requests, select.POLLOUT)
        checked = time.monotonic()
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_POLL_S * 1000)}
            if interpreter.requests in ready and not interpreter.hand_over():
                poll.unregister(interpreter.requests)
            if interpreter.output in ready:
                self.drain()
            if session.fileno() in ready:
                return "closed"
            if self._is_full:
                return "output"
            if interpreter.done in ready and os.read(interpreter.done, 1):
                return "ok"
            if interpreter.exited in ready:
                status = os.waitstatus_to_exitcode(os.waitpid(interpreter.pid, 0)[1])
                return f"exit {status}"
            if (now := time.monotonic()) > deadline:
                return "time"
            if now > checked + _POLL_S:
                checked = now
                if broken := self._broken_limit(cpu_s):
                    return broken

    def _broken_limit(self, cpu_s: float) -> str | None:
        limits = self._limits
        if num_others() > limits.max_processes:
            return "processes"
        processes = descendants()
        if sum(max(0, process.resident_bytes - self._interpreter.base_bytes) for process in processes) > limits.memory_bytes:
            return "memory"
        if sum(process.cpu_s for process in processes) - cpu_s > limits.cpu_s:
            return "cpu"
        return None

    def drain(self) -> None:
        """Read the output that is available, up to the limit."""
        with suppress(BlockingIOError):
            while not self._is_full and (data := os.read(self._interpreter.output, _CHUNK_BYTES)):
                self.output += data
                self._is_full = len(self.output) > self._limits.output_bytes
        del self.output[self._limits.output_bytes :]


def _become_interpreter(requests: int, done: int, output: int, limits: Limits) -> NoReturn:
    """Drop privileges and descriptors, set the limits, and run programs."""
    try:
        os.setsid()
        run_last()
        for source, target in ((output, 1), (output, 2), (requests, 3), (done, 4)):
            os.dup2(source, target) if source != target else os.set_inheritable(target, True)
        os.closerange(5, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/tmp")
        os.umask(0o022)
        forbid_capabilities()
        become_program_user()
        drop_capabilities()
        filter_system_calls()
        prctl(PR_SET_DUMPABLE, 1)  # so that the process owns its files in /proc/self
        address_space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115, PTH123
        set_limits({
            resource.RLIMIT_AS: address_space + limits.memory_bytes,
            resource.RLIMIT_FSIZE: limits.disk_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            resource.RLIMIT_NPROC: limits.max_processes,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        })  # fmt: skip
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_cells(3, 4)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
