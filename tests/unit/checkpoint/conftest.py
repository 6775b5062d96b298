from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from fuligo.checkpoint.state import RunState
from fuligo.rollout.protocol import RolloutState
from fuligo.types import Sample, SampleGroup, SampleStatus

Write = Callable[[Path], Awaitable[None]]


def make_state(iteration: int) -> RunState:
    """Return a run state with an unfinished group in its buffer."""
    unfinished = Sample(
        index=7,
        group_index=1,
        prompt=[{"role": "user", "content": "1 + 1?"}],
        prompt_ids=np.array([3, 4], np.int32),
        label="2",
        metadata={"start_rollout_id": 0},
        response_ids=np.array([9], np.int32),
        loss_mask=np.ones(1, np.int8),
        engine_logprobs=np.array([-0.1], np.float32),
        versions=np.array([3], np.int32),
        status=SampleStatus.ABORTED,
    )
    rollout = RolloutState({"epoch": 1, "offset": 12, "returned": [4, 2]}, 8 * iteration, iteration, [SampleGroup(1, 5, [unfinished])])
    return RunState(step=iteration, policy_version=iteration + 1, rollout=rollout, config="rollout:\n  rollout_batch_size: 8\n")


@pytest.fixture
def state() -> Callable[[int], RunState]:
    return make_state


@pytest.fixture
def weights() -> Callable[[bytes], Write]:
    """Return a function that writes the trainer's part: one file in a subdirectory."""

    def writer(content: bytes = b"weights") -> Write:
        async def write(directory: Path) -> None:
            (directory / "hf").mkdir()
            (directory / "hf" / "model.safetensors").write_bytes(content)

        return write

    return writer
