"""Environment of `benchmarks/episodes.py`: it answers every turn at once, in turn with a user's message and a tool's result."""

from fuligo.environments import AssistantTurn, Environment, Start, Step, Tool, ToolResult

QUESTION = "What is 695 + 830? Think step by step and box the answer."
ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})


class Talk(Environment):
    """Answers at once."""

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
