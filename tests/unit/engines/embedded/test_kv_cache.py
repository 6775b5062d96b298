import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.engines.embedded.kv_cache import SMALLEST_CLASS, CacheShape, KVCache, KVPool, LayerShape, RecurrentShape, length_class
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import SamplingParams

SHAPE = CacheShape((0, 1), (LayerShape(num_heads=2, key_dim=2, value_dim=3),) * 2)
SHAPE_OF_DIFFERENT_HEADS = CacheShape((1, 4), (LayerShape(4, 2, 3), LayerShape(2, 8, 5)))


def request(num_tokens: int, max_new_tokens: int = 100, first_token: int = 0) -> Request:
    return Request("r", list(range(first_token, first_token + num_tokens)), SamplingParams(max_new_tokens), frozenset(), 0)


def fill(cache: KVCache, owner: Request, value: float) -> None:
    """Write the owner's mark into its cached keys and values."""
    cache.pool_of(owner).store[:, owner.row, :, : owner.num_tokens - 1] = value


def held(cache: KVCache, owner: Request) -> torch.Tensor:
    pool = cache.pool_of(owner)
    assert pool.requests[owner.row] is owner
    return pool.store[:, owner.row, :, : owner.num_tokens - 1]


@given(st.integers(1, 5000))
def test_length_classes_are_powers_of_two_that_fit(num_tokens: int) -> None:
    capacity = length_class(num_tokens)
    assert capacity >= num_tokens
    assert capacity == SMALLEST_CLASS or capacity < 2 * num_tokens


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_keep_their_contents_through_joins_leaves_and_growth(data: st.DataObject) -> None:
    """Model-based test: every live request finds what it stored, rows are dense, reservations add up."""
    cache = KVCache(SHAPE, 10**6, torch.float32, torch.device("cpu"))
    live: dict[float, Request] = {}
    for step in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 20))):
            newcomer = request(data.draw(st.integers(1, 130)))
            cache.add(newcomer)
            mark = float(len(live) + 1000 * step + 1)
            fill(cache, newcomer, mark)
            live[mark] = newcomer
        if live:
            leaving = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True))
            cache.remove([live.pop(mark) for mark in leaving])
        for mark, owner in live.items():
            owner.output_ids += [0] * data.draw(st.integers(0, 1))
            cache.promote()
            fill(cache, owner, mark)
        cache.promote()
        for mark, owner in live.items():
            assert (held(cache, owner) == mark).all()
            assert owner.pool_capacity >= owner.num_tokens
        assert sum(len(pool.requests) for pool in cache.pools) == len(live)
        assert cache.reserved_tokens == sum(length_class(owner.max_tokens) for owner in live.values())


@pytest.mark.parametrize("shape", [SHAPE, SHAPE_OF_DIFFERENT_HEADS])
def test_written_keys_and_values_are_read_by_row_head_and_position(shape: CacheShape) -> None:
    pool = KVPool(shape, 32, torch.float32, torch.device("cpu"))
    for _ in range(3):
        pool.append(request(5))
    rows, positions = np.array([2, 0, 2]), np.array([7, 3, 31])
    new = {}
    for layer, (heads, key_dim, value_dim) in zip(shape.layers, shape.shapes):
        new[layer] = torch.randn(3, heads, key_dim), torch.randn(3, heads, value_dim)
        pool.write(layer, torch.from_numpy(pool.slots(rows, positions)), *new[layer])
    for layer, (keys, values) in new.items():
        for number, (row, position) in enumerate(zip(rows, positions)):
            assert torch.equal(pool.keys(layer)[row, :, position], keys[number])
            assert torch.equal(pool.values(layer)[row, :, position], values[number])


def test_tokens_of_a_head_lie_next_to_each_other() -> None:
    """Decoding reads whole heads: a stride over the other heads' elements would cost memory bandwidth."""
    pool = KVPool(CacheShape((0,), (LayerShape(4, 8, 8),)), 32, torch.float32, torch.device("cpu"))
    pool.append(request(5))
    assert pool.keys(0)[0, 0].is_contiguous() and pool.values(0)[0, 3].is_contiguous()


def test_heads_take_no_more_memory_than_their_elements() -> None:
    assert SHAPE.bytes_per_token(torch.float32) == 2 * 2 * (2 * 3) * 4
    assert SHAPE_OF_DIFFERENT_HEADS.bytes_per_token(torch.float32) == 2 * 2 * (2 * 8) * 4, "of the widest layer"


def test_pools_come_shortest_first_and_rows_that_outgrow_one_move_on() -> None:
    cache = KVCache(SHAPE, 10**6, torch.float32, torch.device("cpu"))
    long, short = request(60), request(SMALLEST_CLASS)
    cache.add(long)
    cache.add(short)
    fill(cache, short, 3.0)
    assert [pool.capacity for pool in cache.pools] == [32, 64]
    cache.promote()
    assert [pool.capacity for pool in cache.pools] == [32, 64], "a row that still fits stays"
    short.output_ids.append(0)
    cache.promote()
    assert [[r is short for r in pool.requests] for pool in cache.pools] == [[False, True]]
    assert (held(cache, short)[:, :, : SMALLEST_CLASS - 1] == 3.0).all()


def test_a_prompt_is_copied_but_for_its_last_token() -> None:
    cache = KVCache(SHAPE, 10**6, torch.float32, torch.device("cpu"))
    donor = request(10)
    donor.output_ids = [0] * 40  # the donor is far along, in a longer pool
    copies = [request(10), request(10)]
    for owner in (donor, *copies):
        cache.add(owner)
    cache.pool_of(donor).store[:, donor.row] = torch.arange(64.0)[None, None, :, None]
    cache.copy_prompt(donor, copies)
    for copy in copies:
        assert torch.equal(held(cache, copy)[0, 1, :, 0], torch.arange(9.0))
        assert copy.cached_tokens == 9


def test_reservations_bound_what_is_admitted() -> None:
    cache = KVCache(SHAPE, 128, torch.float32, torch.device("cpu"))
    first, second = request(30, max_new_tokens=34), request(30, max_new_tokens=35)
    assert cache.fits(second), "65 tokens reserve 128"
    cache.add(first)
    assert not cache.fits(second)
    cache.remove([first])
    assert cache.fits(second)


def test_values_that_are_not_finite_do_not_stay_in_rows_used_again() -> None:
    cache = KVCache(SHAPE, 10**6, torch.float32, torch.device("cpu"))
    owner = request(5)
    cache.add(owner)
    cache.pool_of(owner).store[:, owner.row] = float("nan")
    cache.scrub()
    assert torch.isfinite(cache.pool_of(owner).store).all()


def test_states_stay_with_their_requests() -> None:
    """Rows move when others leave, and when they outgrow their pool."""
    shape = RecurrentShape(layers=(1,), num_channels=2, num_inputs=3, num_heads=1, key_dim=2, value_dim=2)
    cache = KVCache(CacheShape((0,), (LayerShape(1, 2, 2),), shape), 10**6, torch.float32, torch.device("cpu"))
    requests = [request(30) for _ in range(4)]
    for number, each in enumerate(requests, 1):
        cache.add(each)
        rows = cache.pool_of(each)
        rows.state(1)[each.row], rows.window(1)[each.row] = number, -number
    cache.remove([requests[0], requests[2]])
    for each in (requests[1], requests[3]):
        each.output_ids += [1] * 3
    cache.promote()
    for number, each in ((2, requests[1]), (4, requests[3])):
        rows = cache.pool_of(each)
        assert each.pool_capacity == 64
        assert (rows.state(1)[each.row] == number).all() and (rows.window(1)[each.row] == -number).all()
