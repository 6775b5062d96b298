"""Trainer ranks on a Ray cluster: the actor of a rank, and its handle."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from fuligo.cluster.node import use_interface_of
from fuligo.config.secret import Environment
from fuligo.engines.server_process import last_lines
from fuligo.limits import raise_open_files
from fuligo.trainer.ranks.handle import RankHandle, RankLostError

if TYPE_CHECKING:
    from fuligo.trainer.ranks.commands import Answer, Command, R, SharedCommand


class TrainerRank:
    """Actor that holds one rank. Commands run in a thread, so that the actor answers pings meanwhile."""

    def __init__(self, rank: int, size: int, host: str, log_file: str, secrets: Environment, umask: int) -> None:
        os.umask(umask)
        os.environ.update(secrets.reveal())
        _redirect_output(Path(log_file))
        use_interface_of(host)
        raise_open_files()
        from fuligo.trainer.ranks.executor import RankExecutor
        from fuligo.trainer.ranks.rank import Rank

        self._rank = rank
        self._executor = RankExecutor(Rank(rank, size, host=host))

    async def run(self, command: Command[R]) -> Answer[R]:
        """Run a command. Its arrays are read-only, because they are in Ray's object store, which the ranks of a node share."""
        answered = self._executor.answer(lambda: command, is_queued=command.is_queued)
        return (await asyncio.wrap_future(answered)).for_driver(self._rank)


class ActorRank(RankHandle):
    """Handle of a `TrainerRank`. A node fetches each command from the object store once for all its ranks."""

    def __init__(self, rank: int, host: str, actor: Any, log_file: Path) -> None:
        super().__init__(rank, host)
        self._actor = actor
        self._log_file = log_file

    async def run(self, command: SharedCommand[R]) -> Answer[R]:
        try:
            return await self._actor.run.remote(command.encoded(ray.put))
        except RayError as error:
            raise RankLostError(f"was lost ({reason(error)})") from None

    async def close(self, *, failed: bool) -> None:
        if not failed:
            await self.leave()
        ray.kill(self._actor)

    def log_hint(self) -> str:
        try:
            lines = last_lines(self._log_file)
        except OSError:
            lines = ""  # on a node whose disk this machine does not share
        return f"Its log ({self._log_file}) ends:\n{lines}" if lines else f"Its log, on that host, is {self._log_file}."


def reason(error: RayError) -> str:
    """Return the message of a Ray error in one line, without its list of actor fields."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("class_name", "actor_id", "namespace", "name:", "pid:", "ip:", "node_id"))]
    return " ".join(telling)[:300] or type(error).__name__


def _redirect_output(log_file: Path) -> None:
    """Append everything that this process and its libraries print to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
