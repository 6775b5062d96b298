"""The run's connection to the process that forks the processes of episodes (`spawner.py`), and the log of what environments print."""

import asyncio
import json
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import IO

from fuligo.environments.isolation import spawner
from fuligo.environments.isolation.spawner import SpawnerSettings
from fuligo.environments.threads import NoThreadError, call_in_thread
from fuligo.errors import ConfigError, RolloutError
from fuligo.quantities import count

logger = logging.getLogger(__name__)
_START_S = 300.0
"""Seconds in which the environment's module must be imported and its settings checked."""
_STATUS_S = 10.0
_PAUSE_S = 0.005
_MAX_LINES_A_MINUTE = 100
_MAX_LINE_CHARS = 500
_START_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fuligo.environments.isolation.spawner import main; main()"


class SpawnerProcess:
    """Process from which the processes of episodes are forked."""

    def __init__(self, settings: SpawnerSettings, variables: Mapping[str, str]) -> None:
        """Store the settings and environment variables of the process; `start` starts it."""
        self._settings = settings
        self._variables = variables
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.output: threading.Thread | None = None
        """Thread that logs the output of environments until all their processes have ended."""
        self._starting, self._asking = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start the process that the others are forked from, unless it is running.

        Raises ConfigError if it cannot load the environment, the environment's module starts threads, or the settings are too large, and
        RolloutError if it does not answer.
        """
        with self._starting:  # several episodes may notice at once that the process has ended
            self._start()

    def _start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.end()
        path, withheld, problem = self._settings.path, ", ".join(sorted(self._settings.withheld)), None
        first_message = self._settings.encode()
        if len(first_message) > spawner.MAX_REQUEST_BYTES:
            raise ConfigError(
                f"cannot isolate the environment {path}: its --environment-settings take {len(first_message):,} bytes, more than "
                f"{spawner.MAX_REQUEST_BYTES:,}; put large values into a file that it reads, or set --environment-isolation none"
            )
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START_CODE, json.dumps(sys.path)],
                stdin=other.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the run
            )
        self.output = threading.Thread(target=_log_output, args=(self.process.stdout,), name="output of environments", daemon=True)
        self.output.start()
        try:
            control.settimeout(_START_S)
            control.send(first_message)
            problem = json.loads(control.recv(spawner.MAX_REQUEST_BYTES))["problem"]
            control.settimeout(_STATUS_S)
        except (OSError, ValueError) as error:
            control.close()
            self.end()
            raise RolloutError(
                f"cannot isolate the environment {path}: its process did not start ({error!r}); see its output above"
            ) from None
        if problem is not None:
            control.close()
            self.end()
            names = f"; withheld from its process: {withheld} (--environment-variables hands them over)" if withheld else ""
            raise ConfigError(f"cannot isolate the environment {path}: {problem}{names}; or set --environment-isolation none")
        self._control = control  # from now on, episodes may ask for processes
        if withheld:
            logger.info("withheld from environments: %s (--environment-variables hands them over)", withheld)

    async def send_descriptor(self, descriptor: int) -> None:
        """Ask for a process that serves the socket `descriptor`; wait while many others are being started.

        Raises BrokenPipeError or ConnectionResetError if the process that forks them has ended.
        """
        while True:
            if self._control is None:
                raise BrokenPipeError
            try:
                socket.send_fds(self._control, [b"."], [descriptor], socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                await asyncio.sleep(_PAUSE_S)

    def request_kill(self, pid: int, *, shows_stack: bool) -> None:
        """Ask the spawner to kill a process and the processes that it started. With `shows_stack`, it first prints its Python stack."""
        if self._control is not None:
            try:
                self._control.send(json.dumps({"name": "kill", "pid": pid, "shows_stack": shows_stack}).encode())
            except OSError:
                logger.debug("the process that starts environments has ended, and with it process %d", pid)

    async def status(self, pid: int) -> str:
        """Return how a process ended after its socket closed. A process that does not end is killed."""
        ask = partial(self._ask_status, pid)
        try:
            return await call_in_thread(ask, "status of an environment")
        except NoThreadError:
            return ask()

    def _ask_status(self, pid: int) -> str:
        with self._asking:
            control, deadline = self._control, time.monotonic() + _STATUS_S
            try:
                assert control is not None
                control.send(json.dumps({"name": "status", "pid": pid}).encode())
                answers = select.poll()  # `select.select` takes no descriptor above 1,023
                answers.register(control, select.POLLIN)
                while answers.poll(1000 * max(0.0, deadline - time.monotonic())):
                    answer = json.loads(control.recv(spawner.MAX_REQUEST_BYTES))
                    if answer["pid"] == pid:
                        return spawner.ending(answer["status"])
            except (OSError, ValueError, AssertionError):
                return "ended with the process that starts environments"
        return "ended"

    def end(self) -> None:
        """End the process, and with it all that it has started."""
        if self._control is not None:
            self._control.close()
        if self.process is not None:
            try:
                self.process.wait(_STATUS_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._control = self.process = None


def _log_output(output: IO[bytes]) -> None:
    """Log the output of environments until it ends, at most `_MAX_LINES_A_MINUTE` lines a minute."""
    minute, num_lines = 0.0, 0
    with output:
        while line := output.readline(1 << 16):
            if time.monotonic() - minute > 60.0:
                if num_lines > _MAX_LINES_A_MINUTE:
                    left_out = count(num_lines - _MAX_LINES_A_MINUTE, "more line")
                    logger.info("environments printed %s within a minute; not logged", left_out)
                minute, num_lines = time.monotonic(), 0
            num_lines += 1
            if num_lines <= _MAX_LINES_A_MINUTE:
                logger.info("environment: %s", line.decode("utf-8", "replace").rstrip("\n")[:_MAX_LINE_CHARS])
