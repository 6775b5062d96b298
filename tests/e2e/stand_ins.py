"""Processes of a command that fork from a process of the tests, so that not every command imports SGLang in 6 s of CPU time.

These are SGLang's servers, and Ray's workers (`warm_worker`); they cannot be children of the command. Where the command would start a
guard with its server, it forks a stand-in, which has the tests start the guard, passes SIGTERM on, and ends as the guard ends. The guard
has the command's pipe as its standard input, and so ends with the command, however that ends. `processes.descendants` follows a stand-in to
its guard.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.e2e.warm_children import LARGEST_REQUEST_BYTES, Children, ForkedChildren, show

ADDRESS = "FULIGO_TEST_SERVERS"
"""Variable with the path of the tests' socket."""
REQUEST = "FULIGO_TEST_SERVER"
"""Variable of a stand-in with the guard's command, environment and directory."""
STAND_IN = "stand-in for "
"""Beginning of a stand-in's command line; the number of the guard follows."""


class Broker:
    """Thread of the tests that starts guards and workers for stand-ins.

    Args:
        servers: start them as children of this process.
        path: of the socket.
    """

    def __init__(self, servers: ForkedChildren, path: Path) -> None:
        self._servers = servers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Start a guard; pass on signals, and its end. It is killed if its stand-in is."""
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST_BYTES, 3)
            request = json.loads(message)
            pid = self._servers.start(request, descriptors) if self._servers.suits(request["command"], request["environment"]) else None
            for descriptor in descriptors:
                os.close(descriptor)
            if pid is None:
                return
            connection.send(str(pid).encode())
            ended, poll = os.pidfd_open(pid), select.poll()  # `select` refuses descriptors above 1023
            poll.register(ended, select.POLLIN)
            poll.register(connection, select.POLLIN)
            while ended not in dict(poll.poll()):
                number = b""
                with suppress(OSError):
                    number = connection.recv(16)
                os.kill(pid, int(number or signal.SIGKILL))
                if not number:
                    poll.unregister(connection)
            os.close(ended)
            status = os.waitpid(pid, 0)[1]
            with suppress(OSError):  # the stand-in was killed
                connection.send(str(status).encode())


class StandIns:
    """Stand-ins that are children of this process, a command.

    Args:
        servers: decide what starts a server.
        children: fork from this command's fork server.
    """

    def __init__(self, servers: ForkedChildren, children: Children) -> None:
        self._servers = servers
        self._children = children

    def suits(self, arguments: Any, environment: Mapping[str, str]) -> bool:
        return self._servers.suits(arguments, environment)

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        assert request["descriptors"] == [0, 1, 2]
        environment = {**os.environ, REQUEST: json.dumps(request)}
        command = [sys.executable, "-m", "tests.e2e.stand_ins"]
        return self._children.start({**request, "command": command, "environment": environment}, descriptors)


def stand_in(address: str, request: str) -> None:
    """Request a process at the tests' socket and stand in for it until it ends; return at once if it may not be forked."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    answer = connection.recv(16)
    if not answer:
        return
    pid = int(answer)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    show([f"{STAND_IN}{pid}"])
    signal.signal(signal.SIGTERM, lambda number, _: connection.send(str(int(number)).encode()))
    code = os.waitstatus_to_exitcode(int(connection.recv(16)))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    stand_in(os.environ[ADDRESS], os.environ[REQUEST])
    sys.exit("the tests start no such server")
