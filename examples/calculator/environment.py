"""Calculator: products that a tiny model cannot compute, and a tool that can."""

import ast
import operator

from fuligo.environments import AssistantTurn, EnvironmentSettings, Row, Step, ToolEnvironment

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Settings(EnvironmentSettings):
    """Settings of the calculator."""

    tool: bool = True
    """False removes the tool, to measure the model without it."""


class Calculator(ToolEnvironment):
    """Environment that asks the question of the row; the reward is 1 if the last answer is the label."""

    Settings = Settings

    def __init__(self, row: Row, settings: Settings) -> None:
        super().__init__(row, settings, [calculator] if settings.tool else [])

    async def judge(self, turn: AssistantTurn) -> Step:
        """Compare the answer with the label."""
        return Step(reward=float(turn.content == self.row.label), done=True)


async def calculator(expression: str) -> int:
    """Compute with +, - and *."""
    return value(ast.parse(expression.strip(), mode="eval").body)


def value(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError: the expression has other operators or operands
    """
    match node:
        case ast.Constant(value=int() as number) if abs(number) < 10**9:
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError(f"cannot compute {ast.unparse(node)}")
