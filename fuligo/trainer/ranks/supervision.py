"""Waiting for a command to be finished by all ranks, and saying which rank did not and why."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from fuligo.errors import FuligoError, TrainerError

POLL_S = 0.05
"""How often a running command is looked after."""
ANSWER_POLL_S = 0.002
"""The same once rank 0 is done and only answers are missing."""
GRACE_S = 5.0
"""After something failed on one rank: how long the others have to fail too, so that the cause is named and not an echo of it."""


class OtherRanks(Protocol):
    """What is known of ranks 1 to N - 1; see `ranks.Ranks`."""

    def unanswered(self) -> list[int]: ...

    def errors(self) -> dict[int, str]: ...

    def lost(self) -> dict[int, int]: ...


class _None:
    """A rank without others."""

    def unanswered(self) -> list[int]:
        return []

    def errors(self) -> dict[int, str]:
        return {}

    def lost(self) -> dict[int, int]:
        return {}


async def finish(phase: str, own: asyncio.Future[Any], ranks: OtherRanks | None, *, timeout_s: float) -> None:
    """Return when rank 0's part (`own`) and the others' parts of the command are done without error.

    Raises:
        TrainerError: a rank ended, failed, or is not done after `timeout_s`; names the rank and the phase.
        FuligoError: rank 0's own.
    """
    ranks = ranks or _None()
    deadline = time.monotonic() + timeout_s
    while not _all_done(own, ranks):
        if ranks.lost() or ranks.errors() or _error(own) is not None:
            break
        if time.monotonic() >= deadline and (late := [*([] if own.done() else [0]), *ranks.unanswered()]):
            raise TrainerError(
                f"trainer rank {', '.join(map(str, late))} did not finish `{phase}` within {timeout_s:g} s. "
                "Resume from the last checkpoint."
            )
        await _pause(own)
    grace_end = time.monotonic() + GRACE_S
    while not (_all_done(own, ranks) or ranks.lost()) and time.monotonic() < grace_end:
        await _pause(own)
    _raise_cause(phase, _error(own), ranks)


def _all_done(own: asyncio.Future[Any], ranks: OtherRanks) -> bool:
    return own.done() and not ranks.unanswered()


async def _pause(own: asyncio.Future[Any]) -> None:
    if own.done():
        await asyncio.sleep(ANSWER_POLL_S)
    else:
        await asyncio.wait([own], timeout=POLL_S)


def _error(own: asyncio.Future[Any]) -> BaseException | None:
    return own.exception() if own.done() else None


def require_running(phase: str, ranks: OtherRanks) -> None:
    """
    Raises:
        TrainerError: a rank has ended; names it and the phase.
    """
    for rank, code in ranks.lost().items():
        raise TrainerError(
            f"trainer rank {rank} ended with exit code {code} during `{phase}` (-9: killed, often for want of memory); "
            "what it printed before tells more. Resume from the last checkpoint."
        )


def _raise_cause(phase: str, own_error: BaseException | None, ranks: OtherRanks) -> None:
    """A lost rank explains all other errors; a deliberate error of rank 0 is the same on all ranks."""
    require_running(phase, ranks)
    if isinstance(own_error, FuligoError):
        raise own_error
    for rank, text in ranks.errors().items():
        raise TrainerError(f"trainer rank {rank} failed in `{phase}`: {text}") from own_error
    if own_error is not None:
        raise own_error
