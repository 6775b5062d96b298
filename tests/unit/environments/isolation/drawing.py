"""Environment that draws random numbers of numpy and of torch."""

import numpy as np
import torch

from fuligo.environments import AssistantTurn, Step
from tests.unit.environments.isolation.misbehaving import Misbehaving


class Drawing(Misbehaving):
    """Says two random numbers in the first step."""

    async def step(self, turn: AssistantTurn) -> Step:
        if turn.last:
            return await super().step(turn)
        return Step([{"role": "user", "content": f"{np.random.random()} {torch.rand(1).item()}"}])
