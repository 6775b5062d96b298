"""Packing: every sample once, limits kept, ranks in step."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.errors import TrainerError
from fuligo.trainer.packing import Capacity, pack, sequence_flops

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=80)
RANKS = st.integers(1, 5)
FLOPS = sequence_flops(linear=1000.0, attention=4.0)


def tokens(plan, lengths):
    return sum(lengths[i] for i in plan.samples)


@given(LENGTHS, RANKS, st.integers(1, 4), st.none() | st.integers(1, 400), st.none() | st.integers(1, 9), st.booleans())
def test_every_sample_counts_once_and_limits_hold(lengths, num_ranks, multiple_of, max_tokens, max_samples, balance):
    capacity = Capacity(max_tokens, max_samples)
    ranks = pack(lengths, capacity, num_ranks=num_ranks, multiple_of=multiple_of, balance_by=FLOPS if balance else None)

    assert len(ranks) == num_ranks
    (num_plans,) = {len(plans) for plans in ranks}  # every rank has the same number of micro-batches
    assert num_plans % multiple_of == 0
    plans = [plan for rank in ranks for plan in rank]
    assert Counter(i for plan in plans if plan.counts for i in plan.samples) == Counter(range(len(lengths)))
    for plan in plans:
        assert plan.samples, "no micro-batch is empty"
        assert max_samples is None or len(plan.samples) <= max_samples
        assert max_tokens is None or len(plan.samples) == 1 or tokens(plan, lengths) <= max_tokens
        assert all(lengths[a] <= lengths[b] for a, b in pairwise(plan.samples)), "shortest first"
    num_training = sum(any(plan.counts for plan in rank) for rank in ranks)
    assert num_training == min(num_ranks, len(lengths)), "as many ranks as possible train on a sample"


@given(LENGTHS, st.integers(300, 900))
def test_no_two_micro_batches_fit_in_one(lengths, max_tokens):
    (plans,) = pack(lengths, Capacity(max_tokens))
    two_smallest = sorted(tokens(plan, lengths) for plan in plans)[:2]
    assert len(plans) == 1 or sum(two_smallest) > max_tokens


def test_micro_batches_are_about_as_long_as_each_other():
    (plans,) = pack([1000] * 9, Capacity(max_tokens=4000))
    assert [len(plan.samples) for plan in plans] == [3, 3, 3], "not 4, 4 and what is left"


@given(LENGTHS, st.integers(1, 300), st.integers(0, 5))
def test_packing_is_a_function_of_the_lengths(lengths, max_tokens, extra):
    once = pack(lengths, Capacity(max_tokens + extra), balance_by=FLOPS)
    assert once == pack(list(lengths), Capacity(max_tokens + extra), balance_by=FLOPS)


def test_balance_is_by_cost_not_by_count():
    lengths = [1000, *[10] * 99]
    ranks = pack(lengths, Capacity(max_tokens=1000), num_ranks=2, balance_by=FLOPS)
    costs = [sum(FLOPS(lengths[i]) for plan in rank for i in plan.samples) for rank in ranks]
    assert max(costs) == FLOPS(1000) > sum(FLOPS(10) for _ in range(99)), "nothing else shares the rank of the long sample"


@given(st.lists(st.integers(1, 100), min_size=40, max_size=80), st.integers(2, 4))
def test_balanced_ranks_differ_by_less_than_the_costliest_sample(lengths, num_ranks):
    ranks = pack(lengths, Capacity(max_tokens=10_000), num_ranks=num_ranks, balance_by=FLOPS)
    costs = [sum(FLOPS(lengths[i]) for plan in rank for i in plan.samples) for rank in ranks]
    assert max(costs) - min(costs) <= FLOPS(max(lengths))


def test_of_micro_batches_that_run_at_the_same_time_the_costlier_goes_to_the_rank_with_least_so_far():
    lengths = [50, 1, 100, 60]
    ranks = pack(lengths, Capacity(max_samples=1), num_ranks=2, balance_by=float)
    assert [[lengths[plan.samples[0]] for plan in rank] for rank in ranks] == [[100, 1], [60, 50]]


@pytest.mark.parametrize("balance_by", [None, FLOPS])
@pytest.mark.parametrize("capacity", [Capacity(max_tokens=100), Capacity(max_samples=2)])
def test_a_micro_batch_is_filled_to_its_limit(capacity, balance_by):
    (plans,) = pack([50, 50, 40, 60], capacity, balance_by=balance_by)
    assert [len(plan.samples) for plan in plans] == [2, 2]


def test_long_samples_that_do_not_divide_evenly_keep_ranks_in_step_with_a_repetition_that_weighs_nothing():
    ranks = pack([50, 50, 50], Capacity(max_tokens=60), num_ranks=2)
    assert [len(plans) for plans in ranks] == [2, 2]
    assert sorted(plan.counts for plans in ranks for plan in plans) == [False, True, True, True]


@given(LENGTHS, RANKS, st.integers(1, 4))
def test_micro_batches_are_cut_rather_than_repeated(lengths, num_ranks, multiple_of):
    if len(lengths) < num_ranks * multiple_of:
        return
    ranks = pack(lengths, Capacity(), num_ranks=num_ranks, multiple_of=multiple_of)
    assert all(len(plans) == multiple_of and all(plan.counts for plan in plans) for plans in ranks)


def test_fewer_samples_than_ranks_are_padded_with_repetitions_that_weigh_nothing():
    ranks = pack([5, 7], Capacity(), num_ranks=4)
    assert sorted((plan.samples, plan.counts) for plans in ranks for plan in plans) == [
        ((0,), False),
        ((0,), False),
        ((0,), True),
        ((1,), True),
    ]


def test_a_step_without_samples_is_refused():
    with pytest.raises(TrainerError, match="without samples"):
        pack([], Capacity())
