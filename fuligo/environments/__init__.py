"""Environments for training, and the exact rendering of their conversations."""

from fuligo.environments.environment import (
    AssistantTurn,
    Environment,
    EnvironmentSettings,
    Row,
    Start,
    Step,
    Tool,
    ToolCall,
    ToolResult,
)
from fuligo.environments.match import Matches, Seat
from fuligo.environments.rubric import Rubric, Score
from fuligo.environments.tool_environment import ToolEnvironment, ToolFunction

__all__ = [
    "AssistantTurn", "Environment", "EnvironmentSettings", "Matches", "Row", "Rubric", "Score", "Seat", "Start", "Step", "Tool",
    "ToolCall", "ToolEnvironment", "ToolFunction", "ToolResult",
]  # fmt: skip
