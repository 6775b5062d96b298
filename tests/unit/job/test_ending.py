"""End of a run: last lines on the console, and what a failed run saves."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fuligo.config.command_line import parse
from fuligo.errors import CheckpointWriteError, DataError, EngineError, RankError
from fuligo.job import show_end
from fuligo.job.ending import save_after_failure
from fuligo.job.engines import Engines
from fuligo.job.periodic import SaveCheckpoint
from fuligo.loop import Loop


@pytest.mark.parametrize(
    ("flags", "saves"),
    [
        ("", True),
        ("--no-save-last", False),
        ("--no-save-last --save-interval 3", True),
        ("--no-save-last --save-interval 4", False),
        ("--no-save-last --debug-rollout-only", True),
    ],
)
def test_a_run_that_saves_nothing_says_so(flags: str, capsys: pytest.CaptureFixture[str], *, saves: bool) -> None:
    """But not a run that trains nothing."""
    show_end(parse(["--num-rollout", "3", *flags.split()]).config, Path("runs/first"))
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "run directory: runs/first"
    assert [line.startswith("no checkpoint saved: --no-save-last") for line in others] == ([] if saves else [True])


class Save:
    """Stand-in for `SaveCheckpoint` that counts its saves."""

    def __init__(self, *, has_unsaved: bool = True, error: Exception | None = None) -> None:
        self.has_unsaved = has_unsaved
        self.num_saved = 0
        self._error = error

    async def save_last(self) -> None:
        if self._error is not None:
            raise self._error
        self.num_saved += 1


def engines(*, lost: bool, colocated: bool = False) -> Engines:
    failure = EngineError("engine 0 died") if lost else None
    return Engines(cast(Any, None), cast(Any, None), devices=cast(Any, object()) if colocated else None, failure=failure)


def loop(*, is_training: bool = False) -> Loop:
    return cast(Loop, SimpleNamespace(is_training=is_training))


BAD_ROW = DataError("cannot use prompts.jsonl:7")
LOST_RANK = RankError("trainer rank 1 is gone", "Its log says why.")


@pytest.mark.parametrize(
    ("error", "is_training", "has_unsaved", "given", "num_saved"),
    [
        (BAD_ROW, False, True, engines(lost=False), 1),
        (BAD_ROW, False, True, None, 1),
        (ZeroDivisionError(), False, True, engines(lost=False), 1),
        (BAD_ROW, False, False, None, 0),
        (BAD_ROW, True, True, None, 0),
        (LOST_RANK, False, True, None, 0),
        (asyncio.CancelledError(), False, True, engines(lost=False), 0),
        (asyncio.CancelledError(), False, True, None, 0),
        (asyncio.CancelledError(), False, True, engines(lost=True), 1),
        (asyncio.CancelledError(), False, True, engines(lost=True, colocated=True), 0),
    ],
    ids=[
        "row",
        "row without engines",
        "bug of a hook",
        "all is saved",
        "in a training step",
        "lost trainer",
        "second Ctrl-C",
        "second Ctrl-C without engines",
        "lost engine",
        "lost engine beside the trainer",
    ],
)
async def test_a_failed_run_saves_while_its_weights_belong_to_a_complete_rollout(
    error: BaseException, given: Engines | None, num_saved: int, caplog: pytest.LogCaptureFixture, *, is_training: bool, has_unsaved: bool
) -> None:
    save = Save(has_unsaved=has_unsaved)
    await save_after_failure(error, loop(is_training=is_training), cast(SaveCheckpoint, save), given, "fuligo train --load x")
    assert save.num_saved == num_saved
    assert caplog.text.count("resume with: fuligo train --load x") == num_saved


async def test_a_save_that_fails_does_not_hide_the_failure_before_it(caplog: pytest.LogCaptureFixture) -> None:
    save = Save(error=CheckpointWriteError("the disk is full"))
    await save_after_failure(BAD_ROW, loop(), cast(SaveCheckpoint, save), None, "resume")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "cannot save the last complete rollout after the failure that ends the run: the disk is full"


async def test_the_error_of_lost_engines_is_kept() -> None:
    async def lost() -> None:
        raise EngineError("engine 0 died")

    given = engines(lost=False)
    with pytest.raises(EngineError):
        await given._keep_failure(lost())
    assert str(given.failure) == "engine 0 died"
