"""Warm start of `fuligo`: a process that has imported what most runs import, and that forks for every command.

A small run spends most of its time on the import of torch and transformers. A forked command differs from a fresh one in two ways: its
modules are imported before its environment is set, and all commands share one hash seed, which orders sets. The same holds for its engine
and its ranks, which
`warm_children` forks; other processes that it starts are fresh.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tests.e2e.warm_children import ROOM, ForkServer, fork_children_warm, import_all, read_by_imports, serve_others

MODULES = (
    "fuligo.cli.console",
    "fuligo.cli.eval",
    "fuligo.cli.preflight",
    "fuligo.cli.train",
    "fuligo.engines.embedded.backend",
    "fuligo.engines.embedded.model",
    "fuligo.job.run",
    "fuligo.trainer.ranks.trainer",
    "fuligo.trainer.torch_backend.worker",
    "pandas",
    *(["peft"] if find_spec("peft") else []),
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Modules that most runs import, with all that they import."""


PR_SET_PDEATHSIG = 1
LARGEST_NUMBER_OF_DESCRIPTORS = 8


class WarmStart:
    """Process that forks for commands, one after the other. It ends with this process, and a command with both, however they end."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = MODULES) -> None:
        self._read_by_imports = read_by_imports(environment)
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.e2e.warm_start", ROOM, str(os.getpid()), str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def suits(self, environment: dict[str, str]) -> bool:
        """Return whether what is already imported is what a command with this environment would import; False after an interrupted one."""
        return self._socket.fileno() != -1 and read_by_imports(environment) == self._read_by_imports

    def fork_server(self, environment: Mapping[str, str] | None = None, namespaces: Sequence[int] = ()) -> ForkServer:
        """Fork a process that starts commands, engines and ranks as children of this process, any number at a time.

        Args:
            environment: variables of those that may fork, if they do not have those of the imports; the difference must not matter to them.
            namespaces: descriptors of the namespaces that the fork server enters.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [_number(0)], [theirs.fileno(), *namespaces])
            _receive_number(self._socket)
        return ForkServer(ours, self._read_by_imports if environment is None else read_by_imports(environment))

    def run(self, arguments: list[str], environment: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run `python -m fuligo` with these arguments to its end, as `subprocess.run` does.

        Raises:
            subprocess.TimeoutExpired: it ran for longer than `timeout_s` and was killed.
        """
        request = json.dumps([arguments, environment, str(Path.cwd())]).encode()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            socket.send_fds(self._socket, [_number(len(request))], [output.fileno(), errors.fileno()])
            self._socket.sendall(request)
            pid = None
            try:
                pid = _receive_number(self._socket)
                self._socket.settimeout(timeout_s)
                status = _receive_number(self._socket)
            except TimeoutError:
                assert pid is not None, "the first number is awaited without a limit"
                os.kill(pid, signal.SIGKILL)
                self._socket.settimeout(None)
                _receive_number(self._socket)
                raise subprocess.TimeoutExpired(arguments, timeout_s, _text(output), _text(errors)) from None
            except BaseException:  # the next command must not take the end of this one for its own process
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                self._socket.close()
                raise
            self._socket.settimeout(None)
            return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), _text(output), _text(errors))


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _receive_number(connection: socket.socket) -> int:
    received = connection.recv(4, socket.MSG_WAITALL)
    assert len(received) == 4, "the process that forks for commands has ended"
    return int.from_bytes(received, "little")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def enter(namespace: int) -> None:
    """Move this process, which has one thread, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a namespace")
    os.close(namespace)


def next_command(connection: socket.socket) -> str:
    """Fork for every request; return in the child only, the module to run, after arguments, environment, directory and output are set."""
    server = os.getpid()
    while True:
        header, descriptors, _, _ = socket.recv_fds(connection, 4, LARGEST_NUMBER_OF_DESCRIPTORS)
        if not header:
            os._exit(0)  # the tests have ended
        length = int.from_bytes(header, "little")
        request = connection.recv(length, socket.MSG_WAITALL) if length else b""
        pid = os.fork()
        if pid == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(_number(pid))
        if not request:  # a fork server, which lives on
            continue
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(BrokenPipeError):  # the test was interrupted
            connection.sendall(_number(status))
    end_with(server)
    connection.close()
    if not request:
        served, *namespaces = descriptors
        for namespace in namespaces:
            enter(namespace)
        return serve_others(socket.socket(fileno=served))
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    arguments, environment, directory = json.loads(request)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored, as in a background job
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[0] = directory
    sys.argv[1:] = arguments
    return fork_children_warm()


if __name__ == "__main__":
    _, _, tests, descriptor, *modules = sys.argv
    end_with(int(tests))
    import_all(modules)
    runpy.run_module(next_command(socket.socket(fileno=int(descriptor))), run_name="__main__", alter_sys=True)
