"""Looking after trainer ranks on a cluster: who is gone, who does not answer, who is late, and what to tell the user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from fuligo.cluster.rank import Answer
from fuligo.engines.server_process import last_lines
from fuligo.errors import TrainerError

HEARTBEAT_S = 5.0
"""Between questions to a rank."""
HEARTBEAT_TIMEOUT_S = 40.0
"""Without an answer a rank is lost: stopped, its node gone, or its interpreter stuck."""
GRACE_S = 5.0
"""After something failed on one rank: how long the others have to fail too, so that the cause is named and not an echo of it."""


@dataclass(slots=True, frozen=True)
class RankHandle:
    """A rank as the driver sees it."""

    rank: int
    host: str
    actor: Any
    """Handle of its `TrainerRank`."""
    log_file: Path

    def lost(self, phase: str, why: str) -> TrainerError:
        return TrainerError(
            f"trainer rank {self.rank} on {self.host} {why} during `{phase}`.{self._last_words()}\n"
            "Checkpoints and the rollouts' buffer are on disk: resume with --load and the directory of the checkpoints."
        )

    def _last_words(self) -> str:
        try:
            lines = last_lines(self.log_file)
        except OSError:
            lines = ""  # of a node whose disk this machine does not share
        return f" Its log ({self.log_file}) ends:\n{lines}" if lines else f" Its log, on that host, is {self.log_file}."


async def heartbeat(rank: RankHandle, phase: str) -> None:
    """
    Raises:
        TrainerError: the rank is gone or does not answer
    """
    try:
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            await rank.actor.pid.remote()
    except TimeoutError:
        raise rank.lost(phase, f"has not answered for {HEARTBEAT_TIMEOUT_S:g} s (stopped, or its node is lost)") from None
    except RayError as error:
        raise rank.lost(phase, f"is gone ({reason(error)})") from None


async def finish(phase: str, ranks: Sequence[RankHandle], calls: Sequence[Any], *, timeout_s: float) -> Any:
    """Rank 0's result, when all ranks are done with their parts.

    Args:
        calls: one for each rank

    Raises:
        TrainerError: a rank was lost, failed, or is not done in time; names rank, host and phase
        FuligoError: rank 0's own
    """
    deadline = time.monotonic() + timeout_s
    parts = [asyncio.ensure_future(_outcome(call)) for call in calls]
    try:
        while not all(part.done() for part in parts) and not any(part.done() and _failed(part.result()) for part in parts):
            left = deadline - time.monotonic()
            if left <= 0:
                late = [rank for rank, part in zip(ranks, parts) if not part.done()]
                others = "" if len(late) == 1 else f" (nor did ranks {', '.join(str(rank.rank) for rank in late[1:])})"
                raise late[0].lost(phase, f"did not finish within {timeout_s:g} s{others}")
            # Those that are done would end the wait at once.
            await asyncio.wait([part for part in parts if not part.done()], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(parts, timeout=GRACE_S)
        outcomes = [part.result() if part.done() else None for part in parts]
    finally:
        for part in parts:
            part.cancel()
    _raise_cause(phase, ranks, outcomes)
    assert isinstance(outcomes[0], Answer)
    return outcomes[0].value


async def _outcome(call: Any) -> Answer | RayError:
    try:
        return await call
    except RayError as error:
        return error


def _failed(outcome: Answer | RayError) -> bool:
    return isinstance(outcome, RayError) or outcome.error is not None


def _raise_cause(phase: str, ranks: Sequence[RankHandle], outcomes: Sequence[Answer | RayError | None]) -> None:
    """A lost rank explains all other errors; a deliberate error of rank 0 is the same on all ranks."""
    for rank, outcome in zip(ranks, outcomes):
        if isinstance(outcome, RayError):
            raise rank.lost(phase, f"is gone ({reason(outcome)})")
    answers = [(rank, outcome) for rank, outcome in zip(ranks, outcomes) if isinstance(outcome, Answer) and outcome.error is not None]
    for rank, answer in sorted(answers, key=lambda pair: not pair[1].is_deliberate):
        assert answer.error is not None
        if answer.is_deliberate and rank.rank == 0:
            raise answer.error
        raise TrainerError(f"trainer rank {rank.rank} on {rank.host} failed in `{phase}`: {answer.error}; its log is {rank.log_file}")


def reason(error: RayError) -> str:
    """Ray's text, without its advice and its addresses of objects."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("class_name", "actor_id", "namespace", "name:", "pid:", "ip:", "node_id"))]
    return " ".join(told)[:300] or type(error).__name__
