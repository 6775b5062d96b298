"""Copies of the state of a rollout."""

import numpy as np

from fuligo.rollout.protocol import RolloutState
from fuligo.types import Sample, SampleGroup


def test_a_copied_state_does_not_change_with_the_run_and_shares_only_routed_experts() -> None:
    routed = np.zeros((3, 2, 1), np.uint8)
    sample = Sample(0, 0, "q", np.array([1], np.int32), metadata={"turn": 1}, routed_experts=routed)
    state = RolloutState({"returned": [1]}, 1, 1, [SampleGroup(0, 0, [sample])])
    copied = state.copy()
    state.source["returned"].append(2)  # type: ignore[union-attr]
    sample.metadata["turn"] = 2
    sample.response = "more"
    sample.prompt_ids[0] = 7
    sample.routed_experts = np.concatenate([routed, routed])
    (group,) = copied.buffer
    assert copied.source == {"returned": [1]}
    assert (group.samples[0].metadata, group.samples[0].response, group.samples[0].prompt_ids.tolist()) == ({"turn": 1}, "", [1])
    assert group.samples[0].routed_experts is routed
