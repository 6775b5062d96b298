"""Bookkeeping of the groups that fill a rollout and of the waves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.errors import RolloutError
from fuligo.rollout.dynamic_sampling import DynamicSampling


def begin(target: int, wave_size: int, **options: bool) -> DynamicSampling:
    sampling = DynamicSampling(target, wave_size, max_waves=3, **options)
    sampling.begin_wave()
    sampling.submit(range(wave_size))
    return sampling


def test_the_first_wave_is_due_before_anything_is_submitted():
    assert DynamicSampling(2, 4, max_waves=3).needs_wave


def test_it_is_complete_the_moment_enough_groups_are_kept():
    sampling = begin(target=2, wave_size=4)
    sampling.finish(3, None)
    assert not sampling.complete
    sampling.finish(1, None)
    assert sampling.complete
    assert sampling.chosen() == [1, 3]


def test_another_wave_is_due_when_kept_and_in_flight_cannot_fill_the_rollout():
    sampling = begin(target=2, wave_size=4)
    sampling.finish(0, "dull")
    sampling.finish(1, "dull")
    assert not sampling.needs_wave, "submitted 4 - dropped 2 = 2 can still fill it"
    sampling.finish(2, "dull")
    assert sampling.needs_wave, "submitted 4 - dropped 3 = 1 cannot"


def test_kept_groups_count_towards_what_can_fill_the_rollout():
    sampling = begin(target=2, wave_size=2)
    sampling.finish(0, None)
    assert not sampling.needs_wave
    sampling.finish(1, "dull")
    assert sampling.needs_wave


def test_what_finishes_after_the_rollout_is_full_is_surplus():
    sampling = begin(target=1, wave_size=3)
    for index in (2, 0):
        sampling.finish(index, None)
    assert sampling.chosen() == [2]
    assert sampling.num_kept == 2


def test_in_submission_order_the_first_submitted_fill_it_however_long_they_take():
    sampling = begin(target=2, wave_size=4, in_submission_order=True)
    sampling.finish(2, None)
    sampling.finish(3, None)
    assert not sampling.complete, "0 and 1 are still in flight"
    sampling.finish(0, "dull")
    assert not sampling.complete
    sampling.finish(1, None)
    assert sampling.complete
    assert sampling.chosen() == [1, 2]
    assert sampling.num_kept == 3


def test_used_up_waves_end_with_an_error_that_says_what_was_dropped_and_why():
    sampling = DynamicSampling(2, 2, max_waves=2)
    for wave in range(2):
        sampling.begin_wave()
        sampling.submit([2 * wave, 2 * wave + 1])
        sampling.finish(2 * wave, "check_reward_nonzero_std")
        sampling.finish(2 * wave + 1, "too_short")
    with pytest.raises(
        RolloutError, match=r"2 sampling waves \(4 prompts\) gave 0 of 2 needed groups.*2 by check_reward_nonzero_std, 2 by too_short"
    ):
        sampling.begin_wave()


@given(
    target=st.integers(1, 5),
    surplus=st.integers(0, 5),
    in_order=st.booleans(),
    data=st.data(),
)
def test_the_books_balance_and_the_choice_is_the_brute_force_one(target: int, surplus: int, in_order: bool, data: st.DataObject):
    sampling = DynamicSampling(target, target + surplus, max_waves=50, in_submission_order=in_order)
    finished: list[tuple[int, bool]] = []
    while not sampling.complete:
        num_dropped = sum(not kept for _, kept in finished)
        assert sampling.needs_wave == (sampling.num_submitted - num_dropped < target)
        if sampling.needs_wave:
            sampling.begin_wave()
            sampling.submit(range(sampling.num_submitted, sampling.num_submitted + target + surplus))
        judged = {index for index, _ in finished}
        index = data.draw(st.sampled_from([index for index in range(sampling.num_submitted) if index not in judged]))
        kept = data.draw(st.booleans()) or sampling.num_waves > 5
        sampling.finish(index, None if kept else "dropped")
        finished.append((index, kept))

    order = sorted(finished) if in_order else finished
    accepted = [index for index, kept in order if kept]
    assert sampling.chosen() == sorted(accepted[:target])
    assert sampling.num_kept == len(accepted)
    assert sorted(sampling.dropped) == sorted(index for index, kept in finished if not kept)
