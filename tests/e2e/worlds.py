"""Environments of whole runs: some of their steps take a while, and one may kill the run (`KILL_AT=step:1`, in rollout 1)."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from fuligo.environments import AssistantTurn, Environment, Row, Start, Step
from fuligo.environments.match import Matches
from tests.e2e.processes import descendants


def run_pid() -> int:
    """Return the process of the run: this one, or the parent of the one that forked it for an episode."""
    if not Matches.in_process_of_one:
        return os.getpid()
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


class Resumable(Environment):
    """Asks three more times; a turn is worth the number of its tokens modulo 3. One sample of a group waits in each step."""

    resumable = True

    async def reset(self) -> Start:
        self.answers: list[str] = []
        return Start([{"role": "user", "content": self.row.prompt if isinstance(self.row.prompt, str) else self.row.prompt[-1]["content"]}])

    async def step(self, turn: AssistantTurn) -> Step:
        if self.row.index % 4 == 1:
            # Those of every other group take far longer if asked to, so that a rollout with enough other groups interrupts them.
            await asyncio.sleep(0.2 if self.row.index % 8 == 1 else float(os.environ.get("LONG_STEP_S", "0.2")))
        where, _, step = os.environ.get("KILL_AT", ":-1").partition(":")
        if where == "step" and self.row.metadata["start_rollout_id"] == int(step) and self.row.index % 4 == 1:
            os.kill(run_pid(), signal.SIGKILL)
        self.answers.append(turn.content)
        done = len(self.answers) == 4
        messages = [] if done else [{"role": "user", "content": f"And {len(self.answers)} times that? é"}]
        return Step(messages, reward=float(turn.num_tokens % 3), done=done, metrics={"answers": len(self.answers)})

    def state(self) -> Any:
        return self.answers

    async def restore(self, state: Any) -> None:
        self.answers = list(state)


class Anew(Resumable):
    """The same world, without a state to continue from."""

    resumable = False


class LosesEngine(Resumable):
    """The same world, in which a step kills the embedded engine while other episodes wait for it (`KILL_AT=engine:1`, in rollout 1)."""

    async def step(self, turn: AssistantTurn) -> Step:
        kill_engine(self.row)
        return await super().step(turn)


def kill_engine(row: Row) -> None:
    """Kill the embedded engine at the second sample of a group, in the rollout that KILL_AT names."""
    where, _, step = os.environ.get("KILL_AT", ":-1").partition(":")
    if where == "engine" and row.metadata["start_rollout_id"] == int(step) and row.index % 4 == 1:
        for pid, command in descendants(run_pid()).items():
            if " serve " in command:
                os.kill(pid, signal.SIGKILL)
