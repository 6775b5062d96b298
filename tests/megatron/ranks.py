"""Pool of ranks for the Megatron tests: processes that start once and run one function after another over gloo.

A function is importable by name (at the top of a test module), takes this rank's `World` first, and its arguments and result can be
pickled. Every run has a process group of its own, of the size that it asks for, and leaves nothing behind.
"""

import gc
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from fuligo.trainer.ranks.world import World, join_world

P = ParamSpec("P")
R = TypeVar("R")
SIZE = 4
PRELOADED = [
    "fuligo.trainer.megatron_backend.worker",
    "tests.tiny",
    *(f"tests.megatron.{file.stem}" for file in sorted(Path(__file__).parent.glob("test_*.py"))),
]
"""Modules that the fork server imports once for all ranks: functions that they run are in the tests' modules."""
TIMEOUT_S = 240.0
NUM_RUNS_OF_A_RANK = 30
"""Number of runs after which a rank is restarted, because objects that still hold a process group keep its gloo threads alive."""
GRACE_S = 5.0
"""Seconds to wait for failures of other ranks after the first failure."""


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    connection: Connection


class RankPool:
    """Up to four ranks, each started on first use. All are restarted after one hangs or is lost."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._ranks: list[_Rank] = []
        self._num_runs = 0

    def run(self, num_ranks: int, function: Callable[Concatenate[World, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `function(world, *args, **kwargs)` on the first `num_ranks` ranks; return the result of each.

        Raises:
            AssertionError: the function raised on a rank or took more than four minutes; the message contains the tracebacks.
        """
        assert 1 <= num_ranks <= SIZE
        if self._num_runs % NUM_RUNS_OF_A_RANK == 0:
            self.close()
        self._start(num_ranks)
        ranks = self._ranks[:num_ranks]
        self._num_runs += 1
        for rank in ranks:
            rank.connection.send((self._num_runs, num_ranks, function, args, kwargs))
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        lost = False
        deadline = time.monotonic() + TIMEOUT_S
        while len(values) + len(errors) < num_ranks and time.monotonic() < deadline:
            waiting = {rank.connection: number for number, rank in enumerate(ranks) if number not in values and number not in errors}
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                number = waiting[connection]
                try:
                    failed, result = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    ranks[number].process.join(GRACE_S)
                    lost, failed, result = True, True, f"ended with exit code {ranks[number].process.exitcode}"
                (errors if failed else values)[number] = result
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors or len(values) < num_ranks:
            if lost or len(values) + len(errors) < num_ranks:
                self.close()
            late = [number for number in range(num_ranks) if number not in values and number not in errors]
            told = [f"rank {number}: {text}" for number, text in sorted(errors.items())]
            raise AssertionError("\n".join([*told, *(f"rank {number} is not done" for number in late)]))
        return [values[number] for number in range(num_ranks)]

    def close(self) -> None:
        """Kill the processes."""
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
            rank.process.join()
        self._ranks, self._store = [], None

    def _start(self, num_ranks: int) -> None:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for number in range(len(self._ranks), num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(number, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))


def _serve(rank: int, port: int, connection: Connection) -> None:
    """Run the functions that the pool sends until it closes its end."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # objects from before the first run stay
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            number, size, function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            world = join_world(rank, size, "cpu", store=PrefixStore(f"run/{number}", store), key=b"of this pool", timeout_s=TIMEOUT_S)
            answer = pickle.dumps((False, function(world, *args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((True, traceback.format_exc()))
        _leave()
        connection.send_bytes(answer)


def _leave() -> None:
    """Destroy the process group, so that ranks that wait for this one in a collective fail at once."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # reference cycles keep models, and process groups with their threads
