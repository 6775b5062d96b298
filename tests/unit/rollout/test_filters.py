"""Built-in filters, and adapters for the user's."""

from types import SimpleNamespace

import numpy as np
import pytest

from fuligo.errors import RolloutError
from fuligo.rollout.filters import check_reward_nonzero_std, group_filter, pop_first, sample_filter
from fuligo.types import Sample, SampleGroup

ARGS = SimpleNamespace(reward_key=None)


def samples(*rewards: float | dict) -> list[Sample]:
    return [Sample(index, 3, "", np.zeros(1, np.int32), reward=reward) for index, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [
        ((0, 1), True),
        ((1, 1, 1), False),
        ((0.1, 0.1 + 2e-6), True),
        ((0.1, 0.1 + 1e-7), False),
        ((1e9, 1e9 + 1), True),
        ((1,), False),
        ((), False),
    ],
)
def test_a_group_is_kept_where_its_rewards_differ(rewards: tuple[float, ...], keep: bool):
    assert check_reward_nonzero_std(ARGS, samples(*rewards)) is keep


def test_the_deviation_is_that_of_the_reward_key():
    group = samples({"acc": 1, "score": 0.2}, {"acc": 1, "score": 0.4})
    assert not check_reward_nonzero_std(SimpleNamespace(reward_key="acc"), group)
    assert check_reward_nonzero_std(SimpleNamespace(reward_key="score"), group)


def test_pop_first_takes_the_groups_that_waited_longest():
    buffer = [samples(0), samples(1), samples(2)]
    first, second, third = buffer
    assert pop_first(None, 0, buffer, 2) == [first, second]
    assert buffer == [third]
    assert pop_first(None, 0, buffer, 5) == [third]
    assert buffer == []


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (True, None),
        (False, "hook"),
        (np.array(True), None),
        (np.float64(0.0), "hook"),
        ((True, "whatever"), None),
        ((False, "too_easy"), "too_easy"),
        ((False, None), "hook"),
    ],
)
def test_a_filter_answers_with_a_truth_value_or_with_a_reason_too(verdict, reason: str | None):
    def hook(args, samples, **kwargs):
        return verdict

    assert group_filter(hook, ARGS)(samples(0, 1)) == reason


@pytest.mark.parametrize("verdict", [None, (None, "too_easy")])
def test_a_filter_without_a_verdict_is_named(verdict: object):
    """A forgotten `return` would drop every group."""

    def hook(args, samples, **kwargs):
        return verdict

    with pytest.raises(RolloutError, match="hook returned None; return True to keep"):
        group_filter(hook, ARGS)(samples(0, 1))


def test_a_filter_that_raises_is_named():
    def hook(args, samples):
        return args.no_such_flag

    with pytest.raises(
        RolloutError, match=r"--dynamic-sampling-filter-path: the function raised on group 3: AttributeError: .* \(test_filters\.py:\d+\)"
    ):
        group_filter(hook, ARGS)(samples(0, 1))


@pytest.mark.parametrize(
    "hook",
    [lambda args, groups: groups[:1], lambda args, groups: groups.clear(), lambda args, groups: groups[1].clear()],
    ids=["returns groups", "removes groups", "removes samples"],
)
def test_a_sample_filter_cannot_change_the_size_of_the_batch(hook):
    with pytest.raises(RolloutError, match="change samples in place"):
        sample_filter(hook, ARGS)([SampleGroup(0, 0, samples(0, 1)), SampleGroup(1, 1, samples(0, 1))])


def test_a_sample_filter_that_leaves_a_wrong_mask_is_named():
    def widen(args, groups):
        groups[1][0].loss_mask = np.ones(3, np.int8)

    with pytest.raises(
        RolloutError,
        match=r"the function left sample 0 with a malformed response, lengths differ: .*loss_mask 3",
    ):
        sample_filter(widen, ARGS)([SampleGroup(0, 0, samples(0, 1)), SampleGroup(1, 1, samples(0, 1))])
