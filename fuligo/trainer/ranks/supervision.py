"""Supervision of trainer ranks: wait until all have answered, and name the rank that is lost, failed or late."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, cast

from fuligo.errors import FuligoError, RankError, TrainerError
from fuligo.trainer.ranks.commands import Answer, R, SharedCommand, UnexpectedError
from fuligo.trainer.ranks.handle import PING, RankHandle, RankLostError

HEARTBEAT_S = 5.0
"""Seconds between pings of a rank."""
HEARTBEAT_TIMEOUT_S = 40.0
"""Seconds without an answer after which a rank counts as lost: its process is stopped, its machine is gone or its interpreter is stuck."""
GRACE_S = 5.0
"""Seconds to wait for errors of the other ranks after one has failed, so that the raised error is the cause and not a consequence."""


def lost(rank: RankHandle, phase: str, how: str) -> RankError:
    """Return the error for a rank that is gone, late or silent, with verb `how` ("was lost") and time `phase` ("during `train`")."""
    return RankError(
        f"trainer rank {rank.rank} on {rank.host} {how} {phase}",
        f"{rank.log_hint()}\nIf the run has saved a checkpoint, resume with --load and the checkpoint directory.",
    )


async def finish(command: str, ranks: Sequence[RankHandle], calls: Sequence[Awaitable[Answer[R]]], *, timeout_s: float) -> R:
    """Wait until all ranks have answered `command`, and return rank 0's result.

    Raises:
        RankError: a rank was lost, crashed, or did not finish in time; names the rank, its host and the command.
        TrainerError: a rank other than 0 raised a `FuligoError`; names the rank, its host and the command.
        FuligoError: rank 0 raised it. Unexpected errors of a rank 0 in this process are raised unchanged too.
    """
    phase = f"during `{command}`"
    deadline = time.monotonic() + timeout_s
    parts = [asyncio.ensure_future(_outcome(call)) for call in calls]
    try:
        while not all(part.done() for part in parts) and not any(part.done() and part.result().error is not None for part in parts):
            await _wait_for_one(parts, deadline)
            late = [rank for rank, part in zip(ranks, parts, strict=True) if not part.done()]
            if late and time.monotonic() >= deadline:
                numbers = ", ".join(str(rank.rank) for rank in late[1:])
                others = f" (nor did {'rank' if len(late) == 2 else 'ranks'} {numbers})" if numbers else ""
                raise lost(late[0], phase, f"did not finish within {timeout_s:g} s{others}")
        grace_end = time.monotonic() + GRACE_S
        while not (all(part.done() for part in parts) or any(_is_lost(part) for part in parts)) and time.monotonic() < grace_end:
            await _wait_for_one(parts, grace_end)
        outcomes = [part.result() if part.done() else None for part in parts]
    finally:
        for part in parts:
            part.cancel()
    _raise_cause(command, ranks, outcomes)
    assert outcomes[0] is not None
    return cast(R, outcomes[0].value)


async def heartbeat(rank: RankHandle, phase: str, *, has_answered: bool = True) -> bool:
    """Return whether the rank answers a ping. Raises RankError if it is gone or has stopped answering.

    `has_answered`: it answered an earlier ping. Otherwise it may still be starting, and its silence is not an error.
    """
    try:
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            await rank.run(SharedCommand(PING))
    except TimeoutError:
        if has_answered:
            raise lost(rank, phase, f"has not answered for {HEARTBEAT_TIMEOUT_S:g} s (stopped, or its machine is lost)") from None
        return False
    except RankLostError as error:
        raise lost(rank, phase, str(error)) from None
    return True


async def _outcome(call: Awaitable[Answer[R]]) -> Answer[R]:
    """Return a rank's answer; if the rank is lost, an answer with the RankLostError as its error."""
    try:
        return await call
    except RankLostError as error:
        return Answer(error=error)


async def _wait_for_one(parts: Sequence[asyncio.Future[Any]], deadline: float) -> None:
    # Parts that are done would make `asyncio.wait` return at once.
    pending = [part for part in parts if not part.done()]
    await asyncio.wait(pending, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED)


def _is_lost(part: asyncio.Future[Any]) -> bool:
    return part.done() and isinstance(part.result().error, RankLostError)


def _raise_cause(command: str, ranks: Sequence[RankHandle], answers: Sequence[Answer[Any] | None]) -> None:
    """Raise the error that most likely caused the others: the loss of a rank, or else the first error by `_precedence`."""
    given = zip(ranks, answers, strict=True)
    failed = {rank: answer.error for rank, answer in given if answer is not None and answer.error is not None}
    for rank, error in failed.items():
        if isinstance(error, RankLostError):
            raise lost(rank, f"during `{command}`", str(error))
    if not failed:
        return
    rank = min(failed, key=lambda rank: _precedence(rank.rank, failed[rank]))
    error, own_error = failed[rank], failed.get(ranks[0])
    if error is own_error and not isinstance(error, UnexpectedError):
        raise error
    event = f"trainer rank {rank.rank} on {rank.host} failed during `{command}`: {str(error).rstrip('.')}"
    if isinstance(error, FuligoError) and not isinstance(error, UnexpectedError):
        raise TrainerError(f"{event}. {rank.log_hint()}") from own_error
    raise RankError(event, rank.log_hint()) from own_error


def _precedence(rank: int, error: BaseException) -> tuple[int, int]:
    """Return the sort key of an error, most informative first.

    The order is: `FuligoError` of rank 0 (which usually all ranks raise), of other ranks, unexpected errors of other ranks, of rank 0.
    """
    if isinstance(error, FuligoError) and not isinstance(error, UnexpectedError):
        return (0 if rank == 0 else 1), rank
    return (3 if rank == 0 else 2), rank
