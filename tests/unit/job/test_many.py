"""Parts of several runs at once; tests/e2e/test_many.py runs them whole."""

import asyncio
import io
import os
import pickle
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuligo.engines.backend import LentEngine, LentEngines
from fuligo.errors import EngineError, RunsFailedError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.job import many
from fuligo.job.lent import LentParts
from fuligo.job.many import COMPLETE, run_many
from fuligo.job.many import _require_success as require_success
from fuligo.job.many import _show as show

RunScripts = Callable[..., Any]


def lent() -> tuple[Connection, LentParts]:
    """Return the end of the process of all runs, and the parts as a run has them."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), LentParts(Connection(theirs.detach()), Connection(socket.socket().detach()), num_runs=2)


async def test_a_run_waits_for_its_engines_and_asks_once() -> None:
    control, parts = lent()
    waiting = asyncio.create_task(parts.engines())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    engines = LentEngines("1", (LentEngine("http://here/runs/1", EngineKeys.new()),))
    control.send_bytes(pickle.dumps(engines))
    assert await waiting == engines
    assert await parts.engines() == engines


async def test_the_end_of_the_process_of_all_runs_is_an_error() -> None:
    control, parts = lent()
    control.close()
    with pytest.raises(EngineError, match="the process that all runs share ended before its engines served"):
        await parts.engines()


def test_an_interrupted_run_does_not_wait_for_its_engines() -> None:
    """asyncio waits for the threads of its executor when the loop closes."""
    control, parts = lent()

    async def interrupted() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.engines(), 0.1)

    closing = threading.Timer(20, control.close)  # ends the wait, where there is one
    closing.start()
    asyncio.run(interrupted())
    assert closing.is_alive()
    closing.cancel()


def test_failed_runs_are_named_with_how_they_ended() -> None:
    require_success({"a": COMPLETE, "b": COMPLETE})
    message = "3 of 4 runs failed: b (exit code 1), c (killed by signal 9), d (exit code 2); their output is above"
    with pytest.raises(RunsFailedError, match=re.escape(message)) as caught:
        require_success({"a": COMPLETE, "b": 1, "c": -9, "d": 2})
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("is_terminated", [False, True])
def test_a_process_that_ends_before_its_run_is_complete_has_failed(is_terminated: bool) -> None:
    with pytest.raises(RunsFailedError, match=r"1 of 2 runs failed: b \(exit code 0 before it was complete: does a hook call os\._exit"):
        require_success({"a": COMPLETE, "b": 0}, is_terminated=is_terminated)


async def test_each_line_of_a_run_is_shown_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that arrives in parts, is longer than a read, or has no end."""
    output = asyncio.StreamReader()
    showing = asyncio.create_task(show("wide", output, sys.stdout))
    for part in (b"fi", b"rst\nsecond\n", b"x" * 200_000 + b"\n", b"last"):
        output.feed_data(part)
        await asyncio.sleep(0)
    output.feed_eof()
    await showing
    assert capsys.readouterr().out.splitlines() == ["[wide] first", "[wide] second", "[wide] " + "x" * 200_000, "[wide] last"]


async def test_bytes_that_are_not_text_are_shown_as_escapes() -> None:
    """Also where the encoding of standard output lacks a character."""
    output, shown_on = asyncio.StreamReader(), io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    output.feed_data("café ".encode() + b"\xff\n\xfe")
    output.feed_eof()
    await show("wide", output, shown_on)
    shown_on.seek(0)
    assert shown_on.read() == "[wide] caf\\xe9 \\xff\n[wide] \\xfe\n"


class Engines:
    """Backend whose engines never serve.

    Args:
        on_start: called when their start has begun
    """

    def __init__(self, on_start: Callable[[], object]) -> None:
        self.is_cancelled = False
        self._on_start = on_start

    async def launch_shared(self, *_: object) -> None:
        self._on_start()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled = True


@pytest.fixture
def run_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunScripts:
    """Return a function that runs shell scripts, by name, as the processes of runs."""
    start = asyncio.create_subprocess_exec

    async def run(scripts: Mapping[str, str], engines: Engines | None = None) -> None:
        left = iter(scripts.values())
        monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda *_, **options: start("sh", "-c", next(left), **options))
        monkeypatch.setattr(many, "engine_backend", lambda _: engines)
        configs: Any = dict.fromkeys(scripts, SimpleNamespace(needs_engine=engines is not None))
        monkeypatch.setattr(many, "resolve_device", lambda _: "cpu")
        await asyncio.wait_for(run_many(configs, tmp_path), 30)

    return run


async def test_a_process_that_a_run_leaves_behind_is_not_waited_for(run_scripts: RunScripts, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds the standard output that it has inherited."""
    await run_scripts(
        {"a": f"sleep 60 & echo left $!; echo last >&2; exit {COMPLETE}", "b": f"printf unfinished; sleep 60 & exit {COMPLETE}"}
    )
    shown = capsys.readouterr()
    assert "[a] left " in shown.out and "[b] unfinished" in shown.out
    assert shown.err == "[a] last\n"


async def test_sigterm_ends_runs_whose_engines_do_not_serve_yet(run_scripts: RunScripts) -> None:
    engines = Engines(on_start=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(asyncio.CancelledError):
        await run_scripts(dict.fromkeys("ab", "exec sleep 60"), engines)
    assert engines.is_cancelled


async def test_the_start_of_engines_ends_with_the_last_run(run_scripts: RunScripts) -> None:
    engines = Engines(on_start=lambda: None)
    with pytest.raises(RunsFailedError, match=r"2 of 2 runs failed: a \(exit code 3\), b \(exit code 3\)"):
        await run_scripts(dict.fromkeys("ab", "exit 3"), engines)
    assert engines.is_cancelled


async def test_runs_that_sigterm_ends_have_not_failed(run_scripts: RunScripts) -> None:
    """Only the one that failed before has."""
    engines = Engines(on_start=lambda: asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGTERM))
    scripts = {"a": "exit 3", "b": "exec sleep 60", "c": "trap 'exit 130' TERM; while true; do sleep 0.1; done"}
    with pytest.raises(RunsFailedError, match=r"1 of 3 runs failed: a \(exit code 3\); .*SIGTERM ended 2 more"):
        await run_scripts(scripts, engines)
