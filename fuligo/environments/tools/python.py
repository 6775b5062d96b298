"""Python interpreter in a sandbox, as a tool.

Programs run in separate processes without network, secrets, or access to the machine's files (`fuligo.sandbox.interpreter`). One helper
process, which has imported the `modules` of the settings, serves all episodes of a process. Episodes in separate processes share it if it
was started before them (by `check_sandbox` in the environment's settings). Each session, for one call or one episode, is a fork of the
helper process.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fuligo.errors import ConfigError, RolloutError
from fuligo.limits import num_cores
from fuligo.sandbox import interpreter, processes

_START_S = 60.0
_GRACE_S = 20.0
"""Seconds beyond a call's timeout in which its sandbox must answer."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_FIX = (
    "Programs that a model writes run only where Linux permits user namespaces: on a host,"
    " `sysctl kernel.unprivileged_userns_clone=1` (Debian) or `sysctl kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu 24.04);"
    " in Docker, --security-opt seccomp=unconfined --security-opt systempaths=unconfined --security-opt apparmor=unconfined; in Kubernetes,"
    " seccompProfile Unconfined and procMount Unmasked. See docs/tools.md"
)


class PythonSettings(BaseModel):
    """Limits of the programs that the Python tool runs, and what they may import."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    modules: tuple[str, ...] = ()
    """Modules of fuligo's Python environment that are imported before the first call, such as numpy and sympy. If there are any, programs
    can import all packages of that environment; otherwise only the standard library."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one call."""
    cpu_s: float = Field(default=10.0, gt=0)
    """Limit on the CPU time of one call, over all its processes."""
    memory_mb: int = Field(default=512, ge=16)
    """Limit on the memory of all processes of a program together [MiB], in addition to the interpreter's."""
    disk_mb: int = Field(default=64, ge=1)
    """Size of the private file system in memory [MiB]."""
    output_bytes: int = Field(default=16_384, ge=64)
    """Limit on the output of one call [bytes]; a program that prints more is stopped."""
    max_processes: int = Field(default=16, ge=1)
    """Limit on the processes and threads of a program."""
    max_running: int | None = Field(default=None, ge=1)
    """Limit on the programs that run at once; others wait before their timeout begins. By default the number of cores."""


End = Literal["ok", "exit", "time", "cpu", "memory", "output", "processes"]


class PythonResult(BaseModel):
    """Outcome of a program."""

    model_config = ConfigDict(frozen=True)

    output: str
    """Standard output and error together; the value of an expression at its end; the traceback of an exception."""
    end: End
    """`ok`: it ran to its end or to an exception. `exit`: its process ended. Otherwise the limit that stopped it."""
    status: int = 0
    """Exit status of the process if `end` is `exit`; -N if signal N ended it."""
    keeps_variables: bool = False
    """True if the next program of the session sees the variables of this one."""


class Interpreters:
    """Helper process that serves all sessions with the same `PythonSettings` in this process and its forks.

    It ends with the last of these processes.
    """

    def __init__(self, settings: PythonSettings) -> None:
        self.settings = settings
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start the helper process unless it is running, and wait until it has imported the modules.

        Raises ConfigError if a module cannot be imported, and RolloutError if the process does not start.
        """
        if self._process is not None and (self._owner != os.getpid() or self._process.poll() is None):
            return
        self.close()
        self._owner = os.getpid()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            environment = processes.environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads would not survive forks
            self._process = subprocess.Popen(processes.command(interpreter.__name__), stdin=other.fileno(), env=environment, cwd="/")
        self._control.settimeout(_START_S)
        try:
            self._control.send(json.dumps(asdict(self._limits())).encode())
            answer = json.loads(self._control.recv(1 << 16))
        except (OSError, ValueError) as error:
            self.close()
            raise RolloutError(f"cannot start the Python tool: its process did not answer ({error!r}); see its output above") from None
        if "problem" in answer:
            self.close()
            raise ConfigError(
                f"cannot start the Python tool: {answer['problem']}; install it in fuligo's environment or remove it from `modules`"
            )

    def close(self) -> None:
        """End the helper process. Open sessions continue."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
        self._control = self._process = None

    def open(self) -> socket.socket:
        """Start a session and return the socket to it."""
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError):  # the helper process has ended
                self.close()
                self.start()
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours

    def _limits(self) -> interpreter.Limits:
        settings = self.settings
        paths = tuple(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))) if settings.modules else ()
        shown = dict.fromkeys([*(path for path in _LIBRARIES if Path(path).is_dir()), sysconfig.get_path("stdlib"), *paths])
        return interpreter.Limits(
            timeout_s=settings.timeout_s,
            cpu_s=settings.cpu_s,
            memory_bytes=settings.memory_mb << 20,
            disk_bytes=settings.disk_mb << 20,
            output_bytes=settings.output_bytes,
            max_processes=settings.max_processes,
            max_running=settings.max_running or num_cores(),
            binds=tuple(
                (os.path.realpath(path), path)
                for path in shown
                if not any(path != other and Path(path).is_relative_to(other) for other in shown)
            ),
            paths=paths,
            modules=settings.modules,
        )


_shared: dict[PythonSettings, Interpreters] = {}


def shared_interpreters(settings: PythonSettings) -> Interpreters:
    """Return the interpreters that all episodes with these settings share; the first session or `start` starts them."""
    return _shared.setdefault(settings, Interpreters(settings))


class PythonSession:
    """Interpreter whose programs share their variables and files. It starts with the first program."""

    def __init__(self, settings: PythonSettings) -> None:
        self._interpreters = shared_interpreters(settings)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, code: str) -> PythonResult:
        """Run a program and return its outcome. If the call is canceled, the session ends.

        Raises RolloutError if no sandbox can be built on this machine, or the sandbox ends or does not answer in time, and ConfigError if a
        module cannot be imported.
        """
        try:
            report = await self._ask(code)
        except TimeoutError:
            self.close()
            limit_s = self._interpreters.settings.timeout_s + _GRACE_S
            raise RolloutError(
                f"the sandbox of the Python tool did not answer within {limit_s:g} s; if the machine lacks memory, lower max_running or "
                "memory_mb"
            ) from None
        except BaseException:
            self.close()
            raise
        kind, _, status = report["ended"].partition(" ")
        return PythonResult.model_validate(
            {"output": report["output"], "end": kind, "status": int(status or 0), "keeps_variables": report["kept"]}
        )

    async def _ask(self, code: str) -> dict[str, str]:
        if self._streams is None:
            limit = 8 * self._interpreters.settings.output_bytes + (1 << 16)  # JSON may escape a byte as six
            self._streams = await asyncio.open_unix_connection(sock=self._interpreters.open(), limit=limit)
        reader, writer = self._streams
        writer.write(json.dumps({"code": code}).encode() + b"\n")
        await writer.drain()
        report = await self._read(reader)
        while "started" in report:  # until then, it waited for other programs
            async with asyncio.timeout(self._interpreters.settings.timeout_s + _GRACE_S):
                report = await self._read(reader)
        return report

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> dict[str, str]:
        line = await reader.readline()
        if not line:
            raise RolloutError("the sandbox of the Python tool ended unexpectedly; see its output above")
        report = json.loads(line)
        if "unavailable" in report:
            raise RolloutError(f"cannot run Python in a sandbox: {report['unavailable']}. {_FIX}")
        return report

    def close(self) -> None:
        """End the session and every process in it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class PythonTool:
    """Tool `python` of one episode."""

    def __init__(self, settings: PythonSettings, *, keeps_variables: bool = False) -> None:
        """Create the tool. With `keeps_variables`, the programs of the episode share variables and files, like the cells of a notebook."""
        self._session = PythonSession(settings)
        self._settings = settings
        self._keeps_variables = keeps_variables

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints, and the value of an expression in its last line. `code`: the program."""
        result = await self._session.run(code)
        if not self._keeps_variables:
            self._session.close()
        is_lost = self._keeps_variables and not result.keeps_variables
        parts = (result.output.rstrip("\n"), _end_note(result, self._settings), "All variables are lost." if is_lost else "")
        return "\n".join(filter(None, parts)) or "(no output)"

    def close(self) -> None:
        """End the episode's interpreter."""
        self._session.close()


def _end_note(result: PythonResult, settings: PythonSettings) -> str:
    """Return a sentence for the model if a program did not run to its end, else an empty string."""
    reasons = {
        "time": f"it ran for more than {settings.timeout_s:g} s",
        "cpu": f"it used more than {settings.cpu_s:g} s of CPU time",
        "memory": f"it used more than {settings.memory_mb} MiB of memory",
        "output": f"it printed more than {settings.output_bytes:,} bytes",
        "processes": f"it started more than {settings.max_processes} processes and threads",
    }
    if result.end in reasons:
        return f"The program was stopped: {reasons[result.end]}."
    if result.end == "exit" and result.status < 0:
        known = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
        return f"The program was ended by {known.get(-result.status, f'signal {-result.status}')}."
    return f"The program ended with exit status {result.status}." if result.end == "exit" else ""


def check_sandbox(settings: PythonSettings) -> None:
    """Run an empty program, to check before anything expensive starts that this machine can run programs.

    Raises ConfigError if no sandbox can be built here, or a module cannot be imported.
    """

    async def run() -> None:
        session = PythonSession(settings)
        try:
            await session.run("")
        finally:
            session.close()

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        try:
            thread.submit(asyncio.run, run()).result()
        except RolloutError as error:
            raise ConfigError(str(error)) from None
