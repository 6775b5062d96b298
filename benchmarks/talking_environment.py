"""Environments for benchmarks that answer every turn at once. The processes of episodes import this module."""

from typing import Any

from fuligo.environments import AssistantTurn, Environment, EnvironmentSettings, Start, Step, Tool, ToolResult
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.environments.isolation.workers import Workers
from fuligo.environments.load import EnvironmentFactory, load_environment

QUESTION = "What is 695 + 830? Think step by step and box the answer."
ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})


class Talk(Environment):
    """Environment that answers with a tool's result if the model called a tool, else with a user's message."""

    async def reset(self) -> Start:
        return Start([{"role": "user", "content": QUESTION}], (ADD,))

    async def step(self, turn: AssistantTurn) -> Step:
        if turn.last:
            return Step(reward=1.0, done=True)
        if turn.tool_calls:
            return Step(
                [{"role": "tool", "name": "add", "tool_call_id": turn.tool_calls[0].id, "content": "1525"}],
                tool_results=(ToolResult("add", "1525"),),
            )
        return Step([{"role": "user", "content": QUESTION}])


STORY = (
    "Story {number}: a village by a river has a mill, a school and a market. On market days the farmers of {number} valleys bring grain, "
    "honey and cloth. Tell me what happens there on a rainy morning, and who arrives."
)
ANSWER = "Go on, please: describe the place more exactly, and tell me what the people there say to each other about it."


class Settings(EnvironmentSettings):
    """Settings of `Story`."""

    samples_per_prompt: int


class Story(Environment):
    """Environment that asks the question of the sample's prompt and answers each turn with the same message."""

    Settings = Settings

    async def reset(self) -> Start:
        return Start([{"role": "user", "content": STORY.format(number=self.row.index // self.settings.samples_per_prompt)}])

    async def step(self, turn: AssistantTurn) -> Step:
        return Step(reward=1.0, done=True) if turn.last else Step([{"role": "user", "content": ANSWER}])


def made_environments(name: str, settings: dict[str, Any], isolation: str) -> EnvironmentFactory:
    """Return the factory for an environment class of this module. `isolation`: as in `--environment-isolation`."""
    path = f"{__name__}.{name}"
    loaded = load_environment(path, settings)
    if isolation == "none":
        return loaded
    workers = Workers(path, settings)
    workers.start()
    return IsolatedFactory(loaded.kind, loaded.settings, workers)
