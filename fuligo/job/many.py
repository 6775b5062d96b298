"""Several runs at once on one copy of the base weights: a trainer in this process, engines, and a process for each run.

Each run has its own driver, with its configuration, data, rewards, records and checkpoints, so that a failed run does not disturb the
others. It differs from a single run only in that its trainer rank and its engine are shared (`job.lent`).
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
from typing import Any, TextIO

from fuligo.config import Config
from fuligo.engines.backend import engine_backend
from fuligo.errors import FuligoError, RunsFailedError
from fuligo.job.watch import while_watching
from fuligo.limits import half_the_cores
from fuligo.models.device import resolve_device
from fuligo.trainer.ranks.connected import answer_commands
from fuligo.trainer.ranks.shared import SharedTrainer

COMPLETE = 100
"""Exit code of the process of a run that is complete. Not 0, which a hook that calls `os._exit(0)` or `sys.exit()` also causes."""
INTERRUPTED = 130
"""Exit code of a run that a signal ended; the same as that of `fuligo train`."""
LAST_OUTPUT_S = 1.0
"""Seconds to wait for the last output of a run that has ended; a process that a hook left running may keep the pipes open for longer."""


@dataclass(slots=True)
class RunProcess:
    """Process that drives one of the runs."""

    name: str
    process: asyncio.subprocess.Process
    control: Connection
    """Connection over which the process receives the configuration, then its access to the engines."""
    output: asyncio.StreamReader
    errors: asyncio.StreamReader

    def send(self, message: object) -> None:
        with suppress(OSError):  # the run has ended; its exit code is reported
            self.control.send_bytes(pickle.dumps(message))

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


async def run_many(configs: Mapping[str, Config], logs: Path, *, resume: bool = False) -> None:
    """Run all configurations to their ends. SIGTERM and cancellation end them as they end a single run.

    The engines write their logs to `logs`. For `configs` and `resume`, see `job.run_many_to_end`.
    """
    async with AsyncExitStack() as stack:
        on_cpu = resolve_device(next(iter(configs.values()))) == "cpu"
        trainer = SharedTrainer(max_threads=half_the_cores() if on_cpu else None)
        stack.callback(trainer.stop)
        options = ["--num-runs", str(len(configs)), *(["--resume"] if resume else [])]
        runs = [await _start(name, config, options, trainer, stack) for name, config in configs.items()]
        ends = asyncio.gather(*(_ended(run) for run in runs))
        with _signals_passed_to(runs) as received:
            try:
                await _lend_engines(runs, list(configs.values()), logs, ends, stack)
                codes = await asyncio.shield(ends)
            except asyncio.CancelledError:
                for run in runs:
                    run.send_signal(signal.SIGINT)
                await ends
                raise
            except FuligoError:
                for run in runs:
                    run.send_signal(signal.SIGKILL)
                await ends
                raise
        _require_success(dict(zip(configs, codes, strict=True)), is_terminated=bool(received))
        if received:
            raise asyncio.CancelledError


async def _lend_engines(
    runs: Sequence[RunProcess], configs: Sequence[Config], logs: Path, ends: asyncio.Future[list[int]], stack: AsyncExitStack
) -> None:
    """Start the shared engines and their supervision, and send each run that samples its access to them.

    `ends` is done when all runs have ended; that cancels an unfinished start of the engines. Raises EngineError if an engine did not
    start, with the last lines of its log.
    """
    sampling = [(run, config) for run, config in zip(runs, configs, strict=True) if config.needs_engine]
    if not sampling:
        return
    of_runs = [config for _, config in sampling]
    launching = asyncio.create_task(engine_backend(of_runs[0]).launch_shared(of_runs, logs, stack))
    try:
        await asyncio.wait((launching, ends), return_when=asyncio.FIRST_COMPLETED)
    finally:
        launching.cancel()  # no-op if it is done
        await asyncio.gather(launching, return_exceptions=True)
    if ends.done():
        return
    shared = launching.result()
    if shared.fleet is not None:
        await stack.enter_async_context(while_watching(shared.fleet.watch()))
    for (run, _), lent in zip(sampling, shared.lent, strict=True):
        run.send(lent)


async def _start(name: str, config: Config, options: Sequence[str], trainer: SharedTrainer, stack: AsyncExitStack) -> RunProcess:
    """Start the process of a run, and a thread that answers its commands to the trainer."""
    with ExitStack() as theirs:
        (control, their_control), (commands, their_commands) = socket.socketpair(), socket.socketpair()
        given = [theirs.enter_context(end) for end in (their_control, their_commands)]
        (output, write_output), (errors, write_errors) = await _pipe(stack, theirs), await _pipe(stack, theirs)
        # The child has its own process group, so that Ctrl-C in a terminal reaches only the parent, which passes it on.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "fuligo", "run-of-many", "--control", str(given[0].fileno()), "--trainer", str(given[1].fileno())),
            *("--parent-pid", str(os.getpid()), *options),
            pass_fds=[end.fileno() for end in given],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_output,
            stderr=write_errors,
            process_group=0,
        )
    run = RunProcess(name, process, Connection(control.detach()), output, errors)
    stack.callback(run.control.close)
    stack.callback(run.send_signal, signal.SIGKILL)
    run.send(config)
    lent = Connection(commands.detach())
    executor = trainer.executor()

    def answer() -> None:
        answer_commands(lent, executor)
        lent.close()
        trainer.release(executor)

    threading.Thread(target=answer, name=f"trainer-of-{name}", daemon=True).start()
    return run


async def _pipe(stack: AsyncExitStack, theirs: ExitStack) -> tuple[asyncio.StreamReader, int]:
    """Return a pipe's reader, which `stack` closes, and the descriptor of its other end, which `theirs` closes.

    With asyncio's pipes, `Process.wait` would wait until every process that has inherited them has ended.
    """
    read_end, write_end = os.pipe()
    theirs.callback(os.close, write_end)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    stack.callback(transport.close)
    return reader, write_end


async def _ended(run: RunProcess) -> int:
    """Show the output of a run, each line with its name, until it ends; return its exit code, negative for a signal."""
    exited = asyncio.ensure_future(run.process.wait())
    showing = {asyncio.ensure_future(_show(run.name, *shown)) for shown in ((run.output, sys.stdout), (run.errors, sys.stderr))}
    pending: set[asyncio.Future[Any]] = {exited, *showing}
    try:
        while not exited.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()  # raises if this process cannot write the output
        if left := pending & showing:
            await asyncio.wait(left, timeout=LAST_OUTPUT_S)
    finally:
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return exited.result()


async def _show(name: str, output: asyncio.StreamReader, shown_on: TextIO) -> None:
    unfinished = b""
    try:
        while read := await output.read(1 << 16):
            *lines, unfinished = (unfinished + read).split(b"\n")
            for line in lines:
                _show_line(name, line, shown_on)
    finally:
        if unfinished:
            _show_line(name, unfinished, shown_on)


def _show_line(name: str, line: bytes, shown_on: TextIO) -> None:
    """Show a line, with escapes for bytes that are not text and for characters that the stream's encoding lacks."""
    encoding = shown_on.encoding or "utf-8"
    text = f"[{name}] {line.decode(errors='backslashreplace')}"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), file=shown_on, flush=True)


@contextmanager
def _signals_passed_to(runs: Sequence[RunProcess]) -> Iterator[list[signal.Signals]]:
    """Pass SIGTERM on to all runs during the block, so that they can save first; yield the list of received signals."""
    received: list[signal.Signals] = []

    def pass_on() -> None:
        received.append(signal.SIGTERM)
        for run in runs:
            run.send_signal(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield received
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, pass_on)
    try:
        yield received
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _require_success(codes: Mapping[str, int], *, is_terminated: bool = False) -> None:
    """Raise RunsFailedError unless all runs are complete or, with `is_terminated`, ended by SIGTERM."""
    ended_well = (COMPLETE, INTERRUPTED, -signal.SIGTERM) if is_terminated else (COMPLETE,)  # a run that was still starting was killed
    if failed := [f"{name} ({_described(code)})" for name, code in codes.items() if code not in ended_well]:
        interrupted = sum(code != COMPLETE for code in codes.values()) - len(failed)
        raise RunsFailedError(
            f"{len(failed)} of {len(codes)} runs failed: {', '.join(failed)}; their output is above"
            f"{f'; SIGTERM ended {interrupted} more' if interrupted else ''}. Resume them with the same command and --resume, which skips "
            "complete runs"
        )


def _described(code: int) -> str:
    """Describe how the process of a failed run ended."""
    if code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code}" if code else "exit code 0 before it was complete: does a hook call os._exit or sys.exit?"
