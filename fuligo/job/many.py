"""Several runs at once over one copy of the base weights: a trainer in this process, one engine, and a process for each run.

Each run has its own driver, with its configuration, data, rewards, records and checkpoints, so that one which fails does not disturb
the others. It differs from a run alone only in that its trainer rank and its engine are lent (`job.lent`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from fuligo.config import Config
from fuligo.engines.backend import engine_backend
from fuligo.errors import FuligoError, RunsFailedError
from fuligo.job.watch import while_watching
from fuligo.limits import half_the_cores
from fuligo.models.device import resolve_device
from fuligo.trainer.ranks.connected import answer_commands
from fuligo.trainer.ranks.shared import SharedTrainer

INTERRUPTED = 130
"""Exit code of a run that a signal ended, as `fuligo train` has it."""


@dataclass(slots=True)
class RunProcess:
    """Process that drives one of the runs."""

    name: str
    process: asyncio.subprocess.Process
    control: Connection
    """Brings the configuration, then the engines."""

    def send(self, message: object) -> None:
        with suppress(OSError):  # a run that has ended; its exit code tells
            self.control.send_bytes(pickle.dumps(message))

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


async def run_many(configs: Mapping[str, Config], logs: Path) -> None:
    """Run all configurations to their ends; SIGTERM and cancellation end them as they end a run alone.

    Args:
        configs: checked, by the name of the run
        logs: directory of the engines' logs

    Raises:
        RunsFailedError: runs failed; the others have ended by themselves
        EngineError: the engine did not start, or died
    """
    async with AsyncExitStack() as stack:
        on_cpu = resolve_device(next(iter(configs.values()))) == "cpu"
        trainer = SharedTrainer(max_threads=half_the_cores() if on_cpu else None)
        stack.callback(trainer.stop)
        runs = [await _start(name, config, len(configs), trainer, stack) for name, config in configs.items()]
        ends = asyncio.gather(*(_ended(run) for run in runs))
        with _signals_passed_to(runs) as received:
            try:
                await _lend_engines(runs, list(configs.values()), logs, stack)
                codes = await asyncio.shield(ends)
            except asyncio.CancelledError:
                for run in runs:
                    run.signal(signal.SIGINT)
                await ends
                raise
            except FuligoError:
                for run in runs:
                    run.signal(signal.SIGKILL)
                await ends
                raise
        if received and all(code in (0, INTERRUPTED, -signal.SIGTERM) for code in codes):  # a run that was still starting was killed by it
            raise asyncio.CancelledError
        _require_success(dict(zip(configs, codes, strict=True)))


async def _lend_engines(runs: Sequence[RunProcess], configs: Sequence[Config], logs: Path, stack: AsyncExitStack) -> None:
    """Start the engines, have their supervision end the runs with them, and tell each run that samples how it reaches them.

    Raises:
        EngineError: one did not start; with the last lines of its log
    """
    sampling = [(run, config) for run, config in zip(runs, configs, strict=True) if config.needs_engine]
    if not sampling:
        return
    of_runs = [config for _, config in sampling]
    shared = await engine_backend(of_runs[0]).launch_shared(of_runs, logs, stack)
    if shared.fleet is not None:
        await stack.enter_async_context(while_watching(shared.fleet.watch()))
    for (run, _), lent in zip(sampling, shared.lent, strict=True):
        run.send(lent)


async def _start(name: str, config: Config, num_runs: int, trainer: SharedTrainer, stack: AsyncExitStack) -> RunProcess:
    """Start the process of a run, and answer the commands that it gives the trainer."""
    with ExitStack() as theirs:
        (control, their_control), (commands, their_commands) = socket.socketpair(), socket.socketpair()
        given = [theirs.enter_context(end) for end in (their_control, their_commands)]
        # In its own process group: Ctrl-C in a terminal reaches this process, which passes it on.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "fuligo", "run-of-many", "--control", str(given[0].fileno()), "--trainer", str(given[1].fileno())),
            *("--num-runs", str(num_runs), "--parent-pid", str(os.getpid())),
            pass_fds=[end.fileno() for end in given],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
        )
    run = RunProcess(name, process, Connection(control.detach()))
    stack.callback(run.control.close)
    stack.callback(run.signal, signal.SIGKILL)
    run.send(config)
    lent = Connection(commands.detach())
    executor = trainer.executor()

    def answer() -> None:
        answer_commands(lent, executor)
        lent.close()
        trainer.release(executor)

    threading.Thread(target=answer, name=f"trainer-of-{name}", daemon=True).start()
    return run


async def _ended(run: RunProcess) -> int:
    """Show the output of a run, each line with its name, until it ends; return its exit code, negative for a signal."""
    assert run.process.stdout is not None and run.process.stderr is not None
    await asyncio.gather(_show(run.name, run.process.stdout, sys.stdout), _show(run.name, run.process.stderr, sys.stderr))
    return await run.process.wait()


async def _show(name: str, output: asyncio.StreamReader, shown_on: IO[str]) -> None:
    unfinished = b""
    while read := await output.read(1 << 16):
        *lines, unfinished = (unfinished + read).split(b"\n")
        for line in lines:
            print(f"[{name}] {line.decode(errors='replace')}", file=shown_on, flush=True)
    if unfinished:
        print(f"[{name}] {unfinished.decode(errors='replace')}", file=shown_on, flush=True)


@contextmanager
def _signals_passed_to(runs: Sequence[RunProcess]) -> Iterator[list[signal.Signals]]:
    """Pass SIGTERM on to all runs during the block, which may save first; yield the signals received so far."""
    received: list[signal.Signals] = []

    def pass_on() -> None:
        received.append(signal.SIGTERM)
        for run in runs:
            run.signal(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # others receive no signals
        yield received
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, pass_on)
    try:
        yield received
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _require_success(codes: Mapping[str, int]) -> None:
    """Check that all runs ended with exit code 0.

    Raises:
        RunsFailedError: some did not
    """
    failed = [f"{name} ({f'exit code {code}' if code >= 0 else f'killed by signal {-code}'})" for name, code in codes.items() if code != 0]
    if failed:
        raise RunsFailedError(
            f"{len(failed)} of {len(codes)} runs failed: {', '.join(failed)}; their errors are above. Resume them with the same "
            "command and --resume, which skips complete runs"
        )
