"""Keys, values and states of running requests, in dense pools, one per length class.

A request owns one row of the pool whose capacity fits its length, and moves to the next class when it outgrows it. Rows of a pool are
always `0 .. n-1`, so attention runs on views of the pools: nothing is gathered, and a short row is not padded to the longest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fuligo.engines.embedded.recurrent_state import RecurrentRows, RecurrentShape
from fuligo.engines.embedded.request import Request

SMALLEST_CLASS = 32
MIN_ROWS = 16
KEPT_BYTES = 64 * 1024**2
"""Largest size of an empty pool that is kept for later rows."""


def length_class(num_tokens: int) -> int:
    """Return the capacity of the pool for rows of `num_tokens`: the next power of two."""
    return max(SMALLEST_CLASS, 1 << (num_tokens - 1).bit_length())


class LayerShape(NamedTuple):
    """Shape of the keys and values that a layer keeps per token."""

    num_heads: int
    """Key-value heads."""
    key_dim: int
    value_dim: int


@dataclass(slots=True, frozen=True)
class CacheShape:
    """Shape of the keys and values that a model keeps per token."""

    layers: tuple[int, ...]
    """Numbers of the layers that have keys and values, among all layers of the model."""
    shapes: tuple[LayerShape, ...]
    recurrent: RecurrentShape | None = None
    """Shape of the states of linear attention layers; None: the model has no such layers."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        """Elements per token of the widest layer's keys or values, which every layer reserves."""
        return max(heads * max(key_dim, value_dim) for heads, key_dim, value_dim in self.shapes)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.width * dtype.itemsize


class KVPool:
    """Rows of equal capacity, in one tensor that grows with their number and never shrinks."""

    def __init__(self, shape: CacheShape, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.capacity = capacity
        self.requests: list[Request] = []
        """Request that owns each row."""
        self.store = torch.empty(2 * shape.num_layers, 0, capacity, shape.width, dtype=dtype, device=device)
        """[2 * layers (keys and values alternate), rows, capacity, Hkv * max(Dk, Dv) of the widest layer]"""
        self.recurrent = None if shape.recurrent is None else RecurrentRows(shape.recurrent, dtype, device)

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view [rows, capacity, Hkv, Dk] of a layer's keys."""
        index = self.shape.layers.index(layer)
        heads, key_dim, _ = self.shape.shapes[index]
        return self.store[2 * index, ..., : heads * key_dim].unflatten(-1, (heads, key_dim))

    def values(self, layer: int) -> torch.Tensor:
        """Return a view [rows, capacity, Hkv, Dv] of a layer's values."""
        index = self.shape.layers.index(layer)
        heads, _, value_dim = self.shape.shapes[index]
        return self.store[2 * index + 1, ..., : heads * value_dim].unflatten(-1, (heads, value_dim))

    def append(self, request: Request) -> None:
        request.pool_capacity, request.row = self.capacity, len(self.requests)
        self.requests.append(request)
        self._make_room(len(self.requests))

    def remove(self, requests: Sequence[Request]) -> None:
        """Free the rows of `requests`; the last rows move into the holes."""
        freed = {request.row for request in requests}
        num_left = len(self.requests) - len(freed)
        holes = sorted(row for row in freed if row < num_left)
        movers = [row for row in range(num_left, len(self.requests)) if row not in freed]
        if movers:
            length = max(self.requests[row].num_tokens for row in movers)
            self.store[:, holes, :length] = self.store[:, movers, :length]
            if self.recurrent is not None:
                self.recurrent.move(movers, holes)
        for hole, mover in zip(holes, movers):
            self.requests[hole] = self.requests[mover]
            self.requests[hole].row = hole
        del self.requests[num_left:]

    def _make_room(self, num_rows: int) -> None:
        if self.recurrent is not None:
            self.recurrent.make_room(num_rows)
        held = self.store.shape[1]
        if num_rows <= held:
            return
        layers, _, *rest = self.store.shape
        grown = self.store.new_zeros(layers, max(MIN_ROWS, num_rows, 2 * held), *rest)
        grown[:, :held] = self.store
        self.store = grown


class KVCache:
    """Pools of all length classes. `max_total_tokens` limits the length to which running requests may grow, not the memory allocated."""

    def __init__(self, shape: CacheShape, max_total_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.max_total_tokens = max_total_tokens
        self.reserved_tokens = 0
        self.dtype = dtype
        self.device = device
        self._pools: dict[int, KVPool] = {}

    @property
    def pools(self) -> list[KVPool]:
        """Non-empty pools, shortest class first: the order of rows in a batch."""
        return [self._pools[capacity] for capacity in sorted(self._pools) if self._pools[capacity].requests]

    def pool_of(self, request: Request) -> KVPool:
        """Return the pool that has the request's row."""
        return self._pools[request.pool_capacity]

    def fits(self, request: Request) -> bool:
        return self.reserved_tokens + length_class(request.max_tokens) <= self.max_total_tokens

    def add(self, request: Request) -> None:
        """Give the request a row, and reserve the tokens that it may grow to."""
        self.reserved_tokens += length_class(request.max_tokens)
        self._pool(request.num_tokens).append(request)

    def copy_prompt(self, donor: Request, requests: Sequence[Request]) -> None:
        """Copy the donor's keys and values of all prompt tokens but the last to requests with the same prompt."""
        shared = len(donor.input_ids) - 1
        source = self.pool_of(donor).store[:, donor.row, None, :shared]
        for pool, group in self._by_pool(requests):
            pool.store[:, [request.row for request in group], :shared] = source
            for request in group:
                request.cached_tokens = shared

    def remove(self, requests: Sequence[Request]) -> None:
        for pool, leaving in self._by_pool(requests):
            pool.remove(leaving)
        for request in requests:
            self.reserved_tokens -= length_class(request.max_tokens)
            request.pool_capacity, request.row = 0, -1

    def promote(self) -> None:
        """Move rows that have no room for another token to the next class."""
        for pool in reversed(self.pools):
            outgrown = [request for request in pool.requests if request.num_tokens > pool.capacity]
            if not outgrown:
                continue
            rows = [request.row for request in outgrown]
            longer = self._pool(2 * pool.capacity)
            first = len(longer.requests)
            kept, states = pool.store[:, rows], None if pool.recurrent is None else pool.recurrent.take(rows)
            pool.remove(outgrown)
            for request in outgrown:
                longer.append(request)
            longer.store[:, first : first + len(rows), : pool.capacity] = kept
            if states is not None and longer.recurrent is not None:
                longer.recurrent.put(states, range(first, first + len(rows)))
            if not pool.requests and pool.store.nbytes > KEPT_BYTES:
                del self._pools[pool.capacity]

    def scrub(self) -> None:
        """Zero all values that are not finite: a masked key has weight 0, but 0 times infinity is not 0 in reused rows."""
        for pool in self._pools.values():
            pool.store.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            if pool.recurrent is not None:
                pool.recurrent.scrub()

    def release(self) -> None:
        """Free the memory of all pools; no request may be running."""
        assert not self.pools
        self._pools.clear()

    def _pool(self, num_tokens: int) -> KVPool:
        capacity = length_class(num_tokens)
        if capacity not in self._pools:
            self._pools[capacity] = KVPool(self.shape, capacity, self.dtype, self.device)
        return self._pools[capacity]

    def _by_pool(self, requests: Sequence[Request]) -> Iterator[tuple[KVPool, list[Request]]]:
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.pool_capacity, []).append(request)
        for capacity, group in groups.items():
            yield self._pools[capacity], group
