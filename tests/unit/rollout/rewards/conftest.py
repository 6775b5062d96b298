from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fuligo.types import Sample, SampleGroup, SampleStatus


@pytest.fixture
def make_group() -> Callable[..., SampleGroup]:
    """Return a group of finished samples with these responses and one label."""

    def make(*responses: str, label: Any = None, **metadata: Any) -> SampleGroup:
        samples = [
            Sample(
                index=index,
                group_index=0,
                prompt="what is it?",
                prompt_ids=np.zeros(1, np.int32),
                label=label,
                metadata=dict(metadata),
                response=response,
                status=SampleStatus.COMPLETED,
            )
            for index, response in enumerate(responses)
        ]
        return SampleGroup(index=0, row=0, samples=samples)

    return make
