from collections.abc import Callable

import numpy as np
import pytest

from fuligo.types import Sample, SampleGroup, SampleStatus, Span

MakeGroup = Callable[..., SampleGroup]


def make_sample(index: int, *, group: int, num_tokens: int = 3, **fields: object) -> Sample:
    rng = np.random.default_rng(index)
    known = {
        "prompt": "1 + 1 =",
        "prompt_ids": np.array([5, 6, 7], np.int32),
        "label": "2",
        "response_ids": rng.integers(0, 100, num_tokens).astype(np.int32),
        "loss_mask": np.ones(num_tokens, np.int8),
        "engine_logprobs": -rng.random(num_tokens).astype(np.float32),
        "versions": np.zeros(num_tokens, np.int32),
        "status": SampleStatus.COMPLETED,
        "finish_reason": "stop",
        "reward": float(index % 2),
        "response": f"answer {index}",
        "spans": [
            Span("generate", 100.0 + index, 101.0 + index, engine=index % 2, num_tokens=num_tokens),
            Span("reward", 101.0 + index, 101.5 + index),
        ],
    }
    return Sample(index=index, group_index=group, **{**known, **fields})  # type: ignore[arg-type]


@pytest.fixture
def make_group() -> MakeGroup:
    """Make a group of `size` finished samples; keywords set fields of the samples."""

    def make(index: int = 0, size: int = 2, *, kept: bool = True, drop_reason: str | None = None, **fields: object) -> SampleGroup:
        samples = [make_sample(index * size + position, group=index, **fields) for position in range(size)]
        return SampleGroup(index, index, samples, kept, drop_reason)

    return make
