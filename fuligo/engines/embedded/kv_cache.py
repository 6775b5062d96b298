"""Keys, values and states of running requests, in dense pools, one per length class.

A request owns one row of the pool whose capacity fits its length, and moves to the next class when it outgrows it. Rows of a pool are
always `0 .. n-1`, so attention runs on views of the pools: nothing is gathered, and a short row is not padded to the longest of
the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fuligo.engines.embedded.request import Request

SMALLEST_CLASS = 32
MIN_ROWS = 16
KEPT_BYTES = 64 * 1024**2
"""Largest size of an empty pool that is kept for later rows."""


def length_class(num_tokens: int) -> int:
    """Return the capacity of the pool for rows of `num_tokens`: the next power of two, at least `SMALLEST_CLASS`."""
    return max(SMALLEST_CLASS, 1 << (num_tokens - 1).bit_length())


class LayerShape(NamedTuple):
    """Shape of the keys and values that a layer keeps per token."""

    num_heads: int
    """Key-value heads."""
    key_dim: int
    value_dim: int


@dataclass(slots=True, frozen=True)
class RecurrentShape:
    """Shape of the states of linear attention layers, per request: the last inputs of the convolution, and a matrix per head."""

    layers: tuple[int, ...] = ()
    """Numbers of these layers, among all layers of the model."""
    num_channels: int = 0
    num_inputs: int = 0
    """Earlier inputs that the convolution reads: its width - 1."""
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(slots=True, frozen=True)
class CacheShape:
    """Shape of the keys and values that a model keeps per token, and of the states that it keeps per request."""

    layers: tuple[int, ...]
    """Numbers of the layers that have keys and values, among all layers of the model."""
    shapes: tuple[LayerShape, ...]
    recurrent: RecurrentShape = RecurrentShape()

    @property
    def num_blocks(self) -> int:
        """Number of contiguous blocks in a row: one per key-value head if all layers have equally many, else one."""
        counts = {heads for heads, _, _ in self.shapes}
        return counts.pop() if len(counts) == 1 else 1

    @property
    def block_width(self) -> int:
        """Elements per token and block of the widest layer's keys or values, which every layer reserves."""
        return max(heads // self.num_blocks * max(key_dim, value_dim) for heads, key_dim, value_dim in self.shapes)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * len(self.layers) * self.num_blocks * self.block_width * dtype.itemsize


class KVPool:
    """Rows of equal capacity, in tensors that grow with their number and never shrink.

    The tokens of a head lie next to each other, so that decoding reads memory in order. With the heads of a token next to each other,
    decoding took 2.6 times as long on an AMD EPYC (256 rows of 250 tokens, heads of 32 elements).
    """

    def __init__(self, shape: CacheShape, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.capacity = capacity
        self.requests: list[Request] = []
        """Request that owns each row."""
        self.store = torch.empty(2 * len(shape.layers), 0, shape.num_blocks, capacity, shape.block_width, dtype=dtype, device=device)
        """Keys and values: [2 * layers (keys and values alternate), rows, blocks, capacity, width of a block]"""
        linear = shape.recurrent
        self.windows = torch.zeros(len(linear.layers), 0, linear.num_channels, linear.num_inputs, dtype=dtype, device=device)
        """Latest inputs of the convolutions: [layers, rows, C, inputs]"""
        self.states = torch.zeros(len(linear.layers), 0, linear.num_heads, linear.key_dim, linear.value_dim, device=device)
        """Recurrent states: [layers, rows, H, Dk, Dv] float32"""

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view [rows, Hkv, capacity, Dk] of a layer's keys."""
        return self._by_head(layer, 0)

    def values(self, layer: int) -> torch.Tensor:
        """Return a view [rows, Hkv, capacity, Dv] of a layer's values."""
        return self._by_head(layer, 1)

    def window(self, layer: int) -> torch.Tensor:
        """Return a view [rows, C, inputs] of a layer's convolution inputs."""
        return self.windows[self.shape.recurrent.layers.index(layer)]

    def state(self, layer: int) -> torch.Tensor:
        """Return a view [rows, H, Dk, Dv] of a layer's states."""
        return self.states[self.shape.recurrent.layers.index(layer)]

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots [N * blocks] to which `write` writes the tokens at `positions` [N] of `rows` [N]."""
        blocks = rows[:, None] * self.shape.num_blocks + np.arange(self.shape.num_blocks)
        return (blocks * self.capacity + positions[:, None]).ravel()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys [N, Hkv, Dk] and values [N, Hkv, Dv] of a layer to `slots` [N * blocks]."""
        index = self.shape.layers.index(layer)
        for offset, new in enumerate((keys, values)):
            by_slot = new.reshape(len(slots), -1)
            self.store[2 * index + offset, ..., : by_slot.size(1)].flatten(0, 2).index_copy_(0, slots, by_slot)

    def append(self, request: Request) -> None:
        request.pool_capacity, request.row = self.capacity, len(self.requests)
        self.requests.append(request)
        num_rows, held = len(self.requests), self.store.shape[1]
        if num_rows > held:
            room = max(MIN_ROWS, num_rows, 2 * held)
            self.store, self.windows, self.states = (_grown(rows, room) for rows in (self.store, self.windows, self.states))

    def remove(self, requests: Sequence[Request]) -> None:
        """Free the rows of `requests`; the last rows move into the holes."""
        freed = {request.row for request in requests}
        num_left = len(self.requests) - len(freed)
        holes = sorted(row for row in freed if row < num_left)
        movers = [row for row in range(num_left, len(self.requests)) if row not in freed]
        if movers:
            length = max(self.requests[row].num_tokens for row in movers)
            self.store[:, holes, :, :length] = self.store[:, movers, :, :length]
            self.windows[:, holes], self.states[:, holes] = self.windows[:, movers], self.states[:, movers]
        for hole, mover in zip(holes, movers):
            self.requests[hole] = self.requests[mover]
            self.requests[hole].row = hole
        del self.requests[num_left:]

    def _by_head(self, layer: int, offset: int) -> torch.Tensor:
        """Return a view [rows, Hkv, capacity, D] of a layer's keys (offset 0) or values (1)."""
        index = self.shape.layers.index(layer)
        num_heads, *dims = self.shape.shapes[index]
        rows, dim = self.store[2 * index + offset], dims[offset]
        if self.shape.num_blocks > 1:
            return rows[..., :dim]
        return rows[:, 0, :, : num_heads * dim].unflatten(-1, (num_heads, dim)).transpose(1, 2)


class KVCache:
    """Pools of all length classes. `max_total_tokens` limits `reserved_tokens`, not the memory that is allocated."""

    def __init__(self, shape: CacheShape, max_total_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.max_total_tokens = max_total_tokens
        self.reserved_tokens = 0
        """Sum of the length classes that running requests may grow to."""
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
        """Return whether the limit leaves room for the longest response to a request."""
        return self.reserved_tokens + length_class(request.max_tokens) <= self.max_total_tokens

    def add(self, request: Request) -> None:
        """Give the request a row, and reserve the tokens that it may grow to."""
        self.reserved_tokens += length_class(request.max_tokens)
        self._pool(request.num_tokens).append(request)

    def copy_prompt(self, donor: Request, requests: Sequence[Request]) -> None:
        """Copy the donor's keys and values of all prompt tokens but the last to requests with the same prompt."""
        shared = len(donor.input_ids) - 1
        source = self.pool_of(donor).store[:, donor.row, None, :, :shared]
        for pool, group in self._by_pool(requests):
            pool.store[:, [request.row for request in group], :, :shared] = source
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
            last = first + len(rows)
            kept, windows, states = pool.store[:, rows], pool.windows[:, rows], pool.states[:, rows]
            pool.remove(outgrown)
            for request in outgrown:
                longer.append(request)
            longer.store[:, first:last, :, : pool.capacity] = kept
            longer.windows[:, first:last], longer.states[:, first:last] = windows, states
            if not pool.requests and pool.store.nbytes > KEPT_BYTES:
                del self._pools[pool.capacity]

    def scrub(self) -> None:
        """Zero all values that are not finite: a masked key has weight 0, but 0 times infinity is not 0 in reused rows."""
        for pool in self._pools.values():
            for rows in (pool.store, pool.windows, pool.states):
                rows.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

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


def _grown(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a copy with zeros up to `num_rows` on axis 1."""
    grown = rows.new_zeros(rows.shape[0], num_rows, *rows.shape[2:])
    grown[:, : rows.shape[1]] = rows
    return grown
