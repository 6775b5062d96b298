"""Rank on Ray that records what it was sent. Its process imports this module, and little else."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from fuligo.trainer.ranks.commands import Answer, Command
from fuligo.trainer.shares import SampleScores
from fuligo.types import StepResult, TrainSample


class ListeningRank:
    """Rank that records what it was sent."""

    def __init__(self) -> None:
        self._positions: list[list[int]] = []

    async def run(self, command: Command[Any]) -> Answer[Any]:
        (sent,) = command.arguments
        if command.name == "score":
            self._positions.append(list(sent.positions))
            return Answer([SampleScores(old_logprobs=np.zeros(1, np.float32))] * 16)
        assert command.name == "train"
        self._positions += [list(step.samples.positions) for step in sent]
        samples = [sample for step in sent for sample in step.samples.samples]
        assert not any(array.flags.owndata or array.flags.writeable for array in _arrays(samples)), "each is in the object store"
        return Answer(StepResult(metrics={}, scores={}, num_tokens=0))

    async def positions(self) -> list[list[int]]:
        """Return the positions of its samples for every call and step."""
        return self._positions


def _arrays(samples: list[TrainSample]) -> Iterator[np.ndarray]:
    values = (getattr(sample, field.name) for sample in samples for field in fields(sample))
    return (value for value in values if isinstance(value, np.ndarray))
