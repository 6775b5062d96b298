"""Process that imports the environment's module once and forks the processes of episodes.

The run cannot fork them itself: it has threads and a GPU. This process has one thread and no GPU. It ends, with every process that it
started, when the run ends for whatever reason.
"""

import asyncio
import faulthandler
import fcntl
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from fuligo.environments.isolation import worker
from fuligo.environments.isolation.messages import Reply
from fuligo.environments.load import EnvironmentFactory, load_environment
from fuligo.environments.match import Matches
from fuligo.sandbox import processes
from fuligo.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

MAX_REQUEST_BYTES = 1 << 17
ENDING_S = 0.5
"""Seconds to wait until a process whose socket closed has ended by itself."""
_LOOK_S = 1.0
"""Seconds between checks that the run is alive."""
_KILLED = float("inf")
"""Deadline that marks a process as killed already."""
_SHOWS_STACK = signal.SIGUSR1
"""Signal on which a process prints its Python stack, even while it runs C code."""
_SHOWING_S = 0.1
_SECRET = re.compile("SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEYS?|TOKENS?)(_|$)", re.IGNORECASE)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Limit of math libraries to one thread: a fork does not copy the threads that they start at import, and thousands of processes share
the cores anyway."""


@dataclass(slots=True, frozen=True)
class SpawnerSettings:
    """Settings of the spawner, sent by the run as its first message."""

    path: str
    """Value of --environment."""
    settings: dict[str, Any]
    """Value of --environment-settings."""
    withheld: Sequence[str]
    """Names of the environment variables that were not handed over."""
    memory_bytes: int | None
    """Limit of the data of each process (RLIMIT_DATA); None: unlimited."""
    run_pid: int
    """Process id of the run."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def process_variables(handed_over: tuple[str, ...], environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables for processes of environments, and the names of the variables withheld from them.

    A variable is withheld if its name suggests a secret and is not in `handed_over`. GPUs are hidden, and math libraries use one thread
    unless `environment` says otherwise.
    """
    withheld = tuple(name for name in environment if _SECRET.search(name) and name not in handed_over)
    kept = {name: value for name, value in environment.items() if name not in withheld}
    return _ONE_THREAD | kept | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}, withheld


def main() -> None:
    """Serve requests of the run until its socket closes."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]
    settings = SpawnerSettings(**json.loads(control.recv(MAX_REQUEST_BYTES)))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _ends_with_run(control):
            factory = load_environment(settings.path, settings.settings)
        _end_progress_monitor()
        problem = _threads_problem()
    except BaseException as error:
        factory, problem = None, f"{type(error).__name__}: {error}"
    control.send(json.dumps({"problem": problem}).encode())
    try:
        if factory is not None and problem is None:
            faulthandler.enable()
            gc.collect()
            gc.freeze()  # so that collections in the forks do not copy the pages of these objects
            _Spawner(control, factory, settings).serve()
    finally:
        processes.end_all()


@contextmanager
def _ends_with_run(control: socket.socket) -> Iterator[None]:
    """End this process, and those that it started, if the run ends during the block, so that a hanging import does not outlive it."""
    watched = select.poll()
    watched.register(control, 0)  # hang-ups are always reported

    def look(*_: Any) -> None:
        if watched.poll(0):
            processes.end_all()
            os._exit(1)

    signal.signal(signal.SIGIO, look)
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        look()
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def _end_progress_monitor() -> None:
    """End the thread that tqdm started for progress bars while the module was imported; the next bar starts another."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and tqdm.tqdm.monitor is not None:
        tqdm.tqdm.monitor.exit()
        tqdm.tqdm.monitor = None


def _threads_problem() -> str | None:
    """Return an error if importing the module started Python threads, which forks would lack; else None.

    Threads of C libraries, such as pyarrow's, do not count: the libraries handle forks themselves.
    """
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not names:
        return None
    return f"importing its module started threads ({', '.join(names)}), which a fork does not copy; start them in `reset`"


@dataclass(eq=False)
class _Spawner:
    """Server that forks, kills and reaps the processes of episodes."""

    control: socket.socket
    factory: EnvironmentFactory
    settings: SpawnerSettings
    running: set[int] = field(default_factory=set)
    statuses: dict[int, int | None] = field(default_factory=dict)
    """Exit statuses that the run has not asked for yet, by process id; None if the spawner killed the process."""
    deadlines: dict[int, float] = field(default_factory=dict)
    """Monotonic times at which processes that should end are killed, by process id."""
    asked: set[int] = field(default_factory=set)
    """Ids of processes whose status the run waits for."""
    own_mark: str = field(default_factory=lambda: worker.mark(os.getpid()))
    """Mark of this process, and of the processes that importing the module started (`worker.mark`)."""

    def serve(self) -> None:
        woken, waking = os.pipe()
        for descriptor in (woken, waking):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            wait_s = min([_LOOK_S, *(deadline - time.monotonic() for deadline in self.deadlines.values())])
            ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, wait_s) + 1)}
            if os.getppid() != self.settings.run_pid:  # forks of the run may hold its socket open
                return
            if woken in ready:
                with suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._collect()
            for pid in [pid for pid, deadline in self.deadlines.items() if deadline <= time.monotonic()]:
                _kill(pid)
                self.deadlines[pid] = _KILLED
            if self.control.fileno() in ready and not self._handle(woken, waking):
                return

    def _handle(self, *own: int) -> bool:
        """Handle one request; return False if the run has ended."""
        try:
            data, received, _, _ = socket.recv_fds(self.control, MAX_REQUEST_BYTES, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        if received:
            self._start(received[0], own)
            return True
        request = json.loads(data)
        pid = request["pid"]
        if request["name"] == "kill":
            if pid in self.running:
                self.deadlines[pid] = time.monotonic()
                if request["shows_stack"]:
                    os.kill(pid, _SHOWS_STACK)
                    self.deadlines[pid] += _SHOWING_S
        elif pid in self.running:
            self.asked.add(pid)
            self.deadlines[pid] = time.monotonic() + ENDING_S
        else:
            self._report(pid)
        return True

    def _start(self, descriptor: int, own: tuple[int, ...]) -> None:
        spawner = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            problem = f"cannot start its process: {error.strerror}; raise the limit of processes or memory, or lower --rollout-concurrency"
            with socket.socket(fileno=descriptor) as connection, suppress(OSError):
                connection.sendall(Reply(0, {}, problem).encode())
            return
        if pid == 0:
            _become_worker(descriptor, (self.control.fileno(), *own), spawner, self.factory, self.settings)
        os.close(descriptor)
        self.running.add(pid)

    def _collect(self) -> None:
        """Reap processes that ended, and kill the processes that they left behind."""
        while (ended := _ended()) is not None:
            pid = ended.si_pid
            with suppress(ProcessLookupError, PermissionError):  # before it is reaped: afterwards its id may name another group
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid in self.running:
                self.running.discard(pid)
                was_killed = self.deadlines.pop(pid, 0.0) == _KILLED
                self.statuses[pid] = None if was_killed else os.waitstatus_to_exitcode(status)
                if pid in self.asked:
                    self._report(pid)
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill the processes that an episode started outside its process group. They became children of this process when it ended."""
        for pid in processes.children():
            if pid not in self.running and worker.mark(pid) == worker.MARK != self.own_mark:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _report(self, pid: int) -> None:
        self.asked.discard(pid)
        with suppress(OSError):
            self.control.send(json.dumps({"pid": pid, "status": self.statuses.pop(pid, None)}).encode())


def _ended() -> os.waitid_result | None:
    """Return a process that has ended and was not reaped, or None."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def ending(status: int | None) -> str:
    """Describe how a process ended. `status` is its exit status, the negative number of a signal, or None if the spawner killed it."""
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"ended with exit status {status}"
    known = {each.value: each.name for each in signal.Signals}  # most real-time signals have no name
    hint = "; memory may have run out" if status == -signal.SIGKILL else ""
    return f"ended by signal {-status} ({known.get(-status, 'no name')}{hint})"


def _kill(pid: int) -> None:
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _seed() -> None:
    """Seed the global generators of NumPy and torch, whose state forks would share; Python reseeds its own generator."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _become_worker(
    descriptor: int, unneeded: tuple[int, ...], spawner: int, factory: EnvironmentFactory, settings: SpawnerSettings
) -> NoReturn:
    """Turn this process, a fork of the spawner, into the process of an episode."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.register(_SHOWS_STACK, all_threads=False)
        for each in unneeded:
            os.close(each)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spawner:
            os._exit(1)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that daemons which it starts become its children
        worker.set_mark()
        if settings.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (settings.memory_bytes, settings.memory_bytes))
        _seed()
        Matches.in_process_of_one = True
        asyncio.run(worker.serve(socket.socket(fileno=descriptor), factory, frozenset(settings.withheld)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
