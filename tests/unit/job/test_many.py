"""Parts of several runs at once; tests/e2e/test_many.py runs them whole."""

import asyncio
import pickle
import re
import socket
import sys
from multiprocessing.connection import Connection

import pytest

from fuligo.engines.backend import LentEngine, LentEngines
from fuligo.errors import EngineError, RunsFailedError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.job.lent import LentParts
from fuligo.job.many import _require_success as require_success
from fuligo.job.many import _show as show


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


def test_failed_runs_are_named_with_how_they_ended() -> None:
    require_success({"a": 0, "b": 0})
    message = "3 of 4 runs failed: b (exit code 1), c (killed by signal 9), d (exit code 2); their errors are above"
    with pytest.raises(RunsFailedError, match=re.escape(message)) as caught:
        require_success({"a": 0, "b": 1, "c": -9, "d": 2})
    assert caught.value.exit_code == 1


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
