"""Environments of the tests of episodes; this module imports nothing else, since the processes of environments import it."""

import asyncio
import time
from typing import Any

import numpy as np

from fuligo.environments import AssistantTurn, Environment, EnvironmentSettings, Row, Start, Step, ToolEnvironment


class Settings(EnvironmentSettings):
    reward: float = 1.0


class Counting(Environment):
    """Says the number of the turn until the model says `done`; each turn is worth 0.25, the last one `settings.reward`."""

    Settings = Settings
    resumable = True
    closed = 0

    async def reset(self) -> Start:
        self.turns = 0
        return Start([{"role": "user", "content": f"{self.row.prompt}"}])

    async def step(self, turn: AssistantTurn) -> Step:
        self.turns += 1
        if turn.content == "done":
            return Step(reward=self.settings.reward, done=True, metrics={"score": self.turns})
        return Step([{"role": "user", "content": f"turn {self.turns} é🙂"}], reward=0.25)

    async def close(self) -> None:
        type(self).closed += 1

    def state(self) -> Any:
        return {"turns": self.turns}

    async def restore(self, state: Any) -> None:
        self.turns = state["turns"]


class Anew(Counting):
    resumable = False


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    if a < 0:
        raise ValueError("a is negative")
    return a + b


class Adding(ToolEnvironment):
    """Offers one tool; the answer is right if it equals the label."""

    def __init__(self, row: Row, settings: EnvironmentSettings) -> None:
        super().__init__(row, settings, [add])

    async def judge(self, turn: AssistantTurn) -> Step:
        return Step(reward=float(turn.content == self.row.label), done=True)


class NoText(Exception):
    """Exception whose text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Broken(Environment):
    """Misbehaves as its row says."""

    def __init__(self, row: Row, settings: EnvironmentSettings) -> None:
        super().__init__(row, settings)
        if row.prompt == "exits at once":
            raise SystemExit(3)

    async def reset(self) -> Start:
        if self.row.prompt == "resets to text":
            return Start(["q"])  # type: ignore[list-item]
        tools = ("add",) if self.row.prompt == "offers text" else ()
        return Start([{"role": "user", "content": "q"}], tools)  # type: ignore[arg-type]

    async def step(self, turn: AssistantTurn) -> Step:
        match self.row.prompt:
            case "raises":
                raise RuntimeError("no such game")
            case "hangs":
                await asyncio.Event().wait()
            case "ignores its cancellation":
                while True:
                    try:
                        await asyncio.sleep(2.0)
                        return Step(done=True)
                    except asyncio.CancelledError:
                        continue
            case "exits":
                raise SystemExit(3)
            case "is interrupted":
                raise KeyboardInterrupt
            case "has no text":
                raise NoText
            case "raises a cancellation":
                raise asyncio.CancelledError
            case "cancels itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            case "gives text as a metric":
                return Step(metrics={"speed": "fast"}, done=True)  # type: ignore[dict-item]
            case "gives no metrics":
                return Step(metrics=[1.0], done=True)  # type: ignore[arg-type]
            case "gives text as a result":
                return Step(tool_results=("4",), done=True)  # type: ignore[arg-type]
            case "gives text as a message":
                return Step(["4"])  # type: ignore[list-item]
            case "says nothing":
                return Step()
            case "gives no number":
                return Step(reward=float("nan"), done=True)
            case "gives several numbers":
                return Step(reward=np.ones(2), done=True)  # type: ignore[arg-type]
            case "gives a number of 400 digits":
                return Step(reward=10**400, done=True)
            case "gives no step":
                return None  # type: ignore[return-value]
            case "says what no template renders":
                return Step([{"role": "user"}])
        return Step(done=True, reward=1.0)


class Blocking(Environment):
    """Blocks its process in the only step if the row says so."""

    resumable = True

    async def reset(self) -> Start:
        return Start([{"role": "user", "content": "q"}])

    async def step(self, turn: AssistantTurn) -> Step:
        if self.row.prompt == "blocks":
            time.sleep(3600)  # noqa: ASYNC251 - it is to block
        return Step(reward=1.0, done=True)

    def state(self) -> Any:
        return None

    async def restore(self, state: Any) -> None:
        pass
