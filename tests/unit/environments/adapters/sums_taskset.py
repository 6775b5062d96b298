"""Taskset of verifiers for the tests: sums, with the reward for the label."""

import verifiers.v1 as vf  # installed in its own environment


class Sum(vf.Task):
    """Sum of two numbers, whose total is the task's name."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.messages[-1].content == self.data.name)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """Three sums."""

    def load(self) -> list[Sum]:
        return [Sum(vf.TaskData(prompt=f"what is 1 + {number}", name=f"{1 + number}"), self.config.task) for number in range(3)]


__all__ = ["Sums"]
