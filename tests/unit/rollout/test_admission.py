"""Limit on the groups that may begin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.rollout.continuous import Admission, Request

MANY = 1000


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("version", [0, 1, 7])
def test_with_an_update_after_every_rollout_it_is_the_rule_of_areal(max_staleness: int, version: int):
    """Groups begun in all <= (version + K + 1) * batch size, of which `next_step` rollouts were handed out."""
    admission = Admission(batch_size=4, max_staleness=max_staleness, update_interval=1, num_rollout=MANY)
    waiting = admission.limit(next_step=version, request=Request(version, version), version=version)
    training = admission.limit(next_step=version + 1, request=Request(version, version), version=version)
    assert 4 * version + waiting == 4 * (version + 1) + training == (version + max_staleness + 1) * 4


def test_nothing_is_begun_for_rollouts_after_the_last():
    admission = Admission(batch_size=4, max_staleness=9, update_interval=1, num_rollout=5)
    assert admission.limit(next_step=3, request=Request(3, 3), version=3) == 2 * 4
    assert admission.limit(next_step=5, request=Request(4, 4), version=5) == 0


@given(
    max_staleness=st.integers(0, 4),
    update_interval=st.integers(1, 4),
    step=st.integers(0, 20),
    first_version=st.integers(0, 3),
    handed_out=st.booleans(),
    synced=st.booleans(),
)
def test_the_last_group_in_the_line_is_as_old_as_allowed_when_it_is_trained(
    max_staleness: int, update_interval: int, step: int, first_version: int, handed_out: bool, synced: bool
):
    """Oracle: a simulation of the versions that train the coming rollouts."""
    asked = Request(step, first_version + step // update_interval)
    syncs = handed_out and synced and (step + 1) % update_interval == 0
    now = asked.version + syncs
    admission = Admission(1, max_staleness, update_interval, MANY)
    limit = admission.limit(next_step=step + handed_out, request=asked, version=now)

    trained_by, version = {}, asked.version
    for later in range(step, step + 60):
        trained_by[later] = version
        version += (later + 1) % update_interval == 0
    allowed = [later for later in range(step + handed_out, step + 60) if trained_by[later] - now <= max_staleness]
    assert limit == len(allowed)
    if not handed_out:
        assert limit >= 1, "the rollout that is asked for can be filled"
