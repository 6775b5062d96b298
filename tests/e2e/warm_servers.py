"""Warm start of SGLang's servers on a CPU: a process that has imported SGLang, and from which servers fork with their guards.

Where a process would start a guard with a server, it starts this module once, on SGLang's interpreter, and has it fork for every server
(`warm_children`). The fork becomes the guard, and forks the server where the guard would start a fresh interpreter, which would import for
6 s of CPU time. Programs of tests that call SGLang's own classes (`PROGRAMS`) fork likewise.
"""

import importlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from tests.e2e.warm_children import NOT_READ, READ_BY_IMPORTS, ROOM, Children, import_all, serve, show, show_environment

FORKED = "FULIGO_TEST_FORKED_ENGINE"
"""Variable of servers that may fork; tests of what a server's start leaves behind do not set it."""
PLAIN_MEMORY = "FULIGO_TEST_PLAIN_MEMORY"
"""Variable that a server obeys after the imports (`tests/sglang/stubs`)."""
AHEAD = "FULIGO_AHEAD"
"""Variable with the processes that a server starts ahead (`fuligo/engines/sglang/ahead`); empty in servers that fork as SGLang can."""
READ_LATER = {*NOT_READ, PLAIN_MEMORY, "TOKENIZERS_PARALLELISM"}
"""Variables that no import reads, or that a fork obeys after the imports."""
READ_BY_SGLANG = (*READ_BY_IMPORTS, "FULIGO_TEST_", "SGLANG_", "SGL_", "TRITON_")
MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
    "sglang.srt.server_args",
)
"""Modules that a server imports, with all that they import."""
ROOT = Path(__file__).parents[2]
GUARD = str(ROOT / "fuligo" / "engines" / "guard.py")
PROGRAMS = {
    str(ROOT / "tests" / "sglang" / f"{name}.py")
    for name in (
        *("compiled_kernels", "compressed_loader", "fp8_loader", "interpreted_draws", "interpreted_kernels", "interpreted_ranks"),
        *("kernel_names", "mtp_scorer", "sampler_hook", "schema_reader", "sent_loader"),
    )
}
"""Programs that are started with `python PROGRAM` on SGLang's interpreter."""


def read_by_sglang(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide what SGLang's imports do."""
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_SGLANG) and name not in READ_LATER}


class Servers:
    """Guards, with servers, and programs that are children of this process.

    What forks them starts with the first that has its variables.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[str, Children] = {}
        """By the variables that the imports have read."""

    def suits(self, arguments: Any, environment: Mapping[str, str]) -> bool:
        """Return whether they start a program, or a guard with a server, that may fork."""
        if not isinstance(arguments, list | tuple) or FORKED not in environment:
            return False
        is_guard = [*arguments[:3]] == [sys.executable, "-I", GUARD]
        return arguments[1] in PROGRAMS or (is_guard and arguments[5] == "-c" and "sglang.launch_server" in arguments[6])

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        python, *rest = request["command"]
        if rest[0] in PROGRAMS:
            request = {**request, "command": [python, "-u", *rest]}
        else:
            python = request["command"][4]
        variables = read_by_sglang(request["environment"])
        key = json.dumps(variables, sort_keys=True)
        with self._lock:
            if key not in self._started:
                others = {name: value for name, value in request["environment"].items() if not name.startswith("FULIGO_")}
                self._started[key] = Children(_connect(python, others | variables), {})
        return self._started[key].start(request, descriptors)


def _connect(python: str, variables: Mapping[str, str]) -> socket.socket:
    """Start the process that forks, with the variables of a server except for its keys and its mark."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [python, "-m", "tests.e2e.warm_servers", ROOM, str(theirs.fileno())]
    with theirs:
        subprocess.Popen(command, env=variables, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours


class _Forked(BaseException):
    """Raised in the fork of a guard that becomes the guard's command."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__()
        self.command = command


def _fork_server() -> None:
    """Have this process, a guard, fork where it would start its command."""

    def execute(self: subprocess.Popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = rest
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            for given, number in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
                if given != -1:
                    os.dup2(given, number)
            os.closerange(3, 1024)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise _Forked(args)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    subprocess.Popen._execute_child = execute


def _run(program: str) -> NoReturn:
    sys.argv[0], sys.path[0] = program, str(Path(program).parent)
    _run_to_end(lambda: runpy.run_path(program, run_name="__main__"))


def _run_to_end(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as a fresh process that had run it, without destroying what is imported."""
    random.seed()
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _fork_ahead() -> None:
    """Have this process, a server, fork the processes that it starts ahead; SGLang then gets these as it does on a GPU."""
    multiprocessing.set_start_method = importlib.import_module("sitecustomize")._set_start_method
    spawn = util.spawnv_passfds

    def start(path: bytes, arguments: Sequence[str | bytes], descriptors: Sequence[int]) -> int:
        program = str(arguments[-2])
        if "fuligo_ahead.wait" not in program:
            return spawn(path, arguments, descriptors)
        pid = os.fork()
        if pid == 0:
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
                if int(name) > 2 and int(name) not in descriptors:
                    with suppress(OSError):
                        os.close(int(name))
            show([os.fsdecode(argument) for argument in arguments])
            sys.argv[:] = ["-c", "--multiprocessing-fork"]
            _run_to_end(lambda: exec(program, {"__name__": "__main__"}))
        return pid

    util.spawnv_passfds = start


def _look_up_late() -> None:
    """Have SGLang's HTTP server look up at its start what fuligo's program replaces before a fresh server would have imported it."""
    http_server, auth = (importlib.import_module(f"sglang.srt.{name}") for name in ("entrypoints.http_server", "utils.auth"))
    http_server.app_has_admin_force_endpoints = lambda app: auth.app_has_admin_force_endpoints(app)  # noqa: PLW0108


def main() -> None:
    """Fork for every request until the process that sends them ends.

    In a fork, run the program, which may be a guard; in the fork of a guard, run its server.
    """
    importlib.import_module("sitecustomize").name_kernels()
    import_all(MODULES)
    _look_up_late()
    importlib.import_module("setproctitle").setproctitle("warm servers")  # so that it knows where the command line is
    fresh = subprocess.Popen._execute_child
    program = serve(socket.socket(fileno=int(sys.argv[2])))
    show_environment()
    if program != GUARD:
        _run(program)
    _fork_server()
    try:
        sys.argv[0] = program
        runpy.run_path(program, run_name="__main__")
    except _Forked as fork:
        command = fork.command
    except SystemExit as end:
        assert isinstance(end.code, int)
        os._exit(end.code)  # a fresh guard has nothing of SGLang to destroy, which would take 0.5 s
    subprocess.Popen._execute_child = fresh
    show(command)
    show_environment()
    random.seed()
    if os.environ.get(AHEAD):
        _fork_ahead()
    sys.path[0], sys.argv[:] = "", command[1:2] + command[3:]
    exec(command[2], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
