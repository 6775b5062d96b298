"""Environment in which the model answers questions by writing short Python programs and reading their output, as in ReTool."""

import re
from typing import Any

from pydantic import model_validator

from fuligo.environments import AssistantTurn, EnvironmentSettings, Row, Step, ToolEnvironment
from fuligo.environments.tools.python import PythonSettings, PythonTool, check_sandbox


class Settings(EnvironmentSettings):
    """Limits of programs, and whether the programs of an episode share their variables."""

    python: PythonSettings = PythonSettings()
    keeps_variables: bool = True

    @model_validator(mode="after")
    def _needs_a_sandbox(self) -> "Settings":
        check_sandbox(self.python)  # before the run starts
        return self


class Code(ToolEnvironment):
    """Environment that asks the question of the row; the reward is 1 if the last number of the last answer is the label."""

    Settings = Settings

    def __init__(self, row: Row, settings: Settings) -> None:
        self._tool = PythonTool(settings.python, keeps_variables=settings.keeps_variables)
        super().__init__(row, settings, [self._tool.python])

    async def judge(self, turn: AssistantTurn) -> Step:
        """Compare the number with the label."""
        numbers: list[Any] = re.findall(r"-?\d+(?:\.\d+)?", turn.content.replace(",", ""))
        return Step(reward=float(bool(numbers) and numbers[-1] == str(self.row.label)), done=True)

    async def close(self) -> None:
        self._tool.close()
