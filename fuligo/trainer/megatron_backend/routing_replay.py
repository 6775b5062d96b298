"""Routing replay: tokens go to the experts that were chosen for them before, by the engine or by an earlier pass.

Megatron-Core 0.16.1 has a hook for it: a router asks its `router_replay` for the choice, and computes the weights from its current
scores, so that gradients reach the router. Megatron's own `RouterReplay` is not used. It ignores padding, its recording keeps the last
micro-batch only, and it must be told whether a pass recomputes, which no single switch can say while a pipeline has forward and backward
passes in flight.

Here each router counts its calls. Every schedule takes a stage's micro-batches in one order, through the forward and the backward passes. A
call without gradients is a first pass, of scoring or of a layer that will be recomputed; one with gradients is the recomputation, or the
only pass of a layer. So each kind of call meets the micro-batches in their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from fuligo.errors import TrainerError
from fuligo.models.routing import RoutingShape
from fuligo.trainer.batch import PackedTokens
from fuligo.trainer.megatron_backend.packed import PackedRow
from fuligo.trainer.megatron_backend.router import PackedRouter
from fuligo.trainer.megatron_backend.weights.local import unwrapped
from fuligo.types import RoutedExperts, TrainSample

ChooseOwn = Callable[..., tuple[Tensor, Tensor]]
UNKNOWN = -1
"""Choice of padding, and of tokens without a record: the router chooses."""


class _RouterHook(ABC):
    """Hook of one router, which Megatron calls micro-batch by micro-batch."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ChooseOwn | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return [tokens, K] scores of the chosen experts, and their numbers."""
        assert default_compute_topk is not None
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.choose(own)
        return scores.gather(1, chosen), chosen

    @abstractmethod
    def choose(self, own: Tensor) -> Tensor:
        """Return [tokens, K] experts to use, given the router's own choice."""


class LayerReplay(_RouterHook):
    """Replay of one router's choices.

    Args:
        choices: [tokens, K] of each micro-batch, `UNKNOWN` where the router chooses.
        counts: [tokens] how many samples have each token of each micro-batch.
    """

    def __init__(self, choices: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        self._choices, self._counts = choices, counts
        self._num_calls = {False: 0, True: 0}
        self.num_changed = torch.zeros((), dtype=torch.int64, device=choices[0].device)
        """Number of replayed experts of all samples that the router would not have chosen, in calls with gradients."""

    def choose(self, own: Tensor) -> Tensor:
        with_gradients = torch.is_grad_enabled()
        number = self._num_calls[with_gradients]
        known = self._choices[number]
        self._num_calls[with_gradients] += 1
        chosen = torch.where(known == UNKNOWN, own, known.long())
        if with_gradients:
            self.num_changed += (self._counts[number] * (chosen[:, :, None] != own[:, None, :]).all(-1).sum(-1)).sum()
        return chosen

    @property
    def is_complete(self) -> bool:
        """True if every micro-batch was seen equally often."""
        calls = set(self._num_calls.values())
        return len(self._choices) in calls and calls <= {0, len(self._choices)}


class LayerRecord(_RouterHook):
    """Record of one router's choices, micro-batch by micro-batch, in a dtype that holds an expert's number.

    Kept on the device until the end: copying to the host would make every layer wait.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.choices: list[Tensor] = []
        """[tokens, K] of each micro-batch."""

    def choose(self, own: Tensor) -> Tensor:
        self.choices.append(own.to(self._dtype))
        return own


@dataclass(slots=True, frozen=True)
class RecordedPart:
    """One rank's record of one sample."""

    num_tokens: int
    """Tokens of the whole sample without its last, which goes to no expert."""
    positions: np.ndarray
    """[n] positions of the rank's tokens in the sample."""
    layers: tuple[int, ...]
    """[m] numbers of the rank's layers among the M with experts."""
    experts: RoutedExperts
    """[n, m, K]"""


def replayed_routers(chunks: Iterable[nn.Module], shape: RoutingShape) -> dict[int, PackedRouter]:
    """Return this rank's routers by the number of their layer among the M with experts, without MTP layers, which no engine records."""
    found: dict[int, PackedRouter] = {}
    for chunk in chunks:
        for module in unwrapped(chunk).decoder.modules():
            if isinstance(module, PackedRouter):
                assert module.layer_number is not None
                found[shape.moe_layers.index(module.layer_number - 1)] = module
    return found


@contextmanager
def asked(routers: Mapping[int, PackedRouter], about: Mapping[int, LayerReplay | LayerRecord]) -> Iterator[None]:
    """Attach a replay or record to each router while the block runs."""
    try:
        for layer, router in routers.items():
            router.router_replay = about[layer]  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        for router in routers.values():
            router.router_replay = None
    for layer, replay in about.items():
        assert not isinstance(replay, LayerReplay) or replay.is_complete, f"layer {layer} did not see every micro-batch"


@contextmanager
def replayed(
    chunks: Sequence[nn.Module],
    rows: Sequence[PackedRow],
    tokens: Sequence[PackedTokens],
    samples: Sequence[Sequence[TrainSample]],
    shape: RoutingShape,
    tp_group: dist.ProcessGroup,
) -> Iterator[dict[int, LayerReplay]]:
    """Send the tokens of these micro-batches to the experts that their samples name while the block runs; yield the replays."""
    routers = replayed_routers(chunks, shape)
    config = get_model_config(chunks[0])
    layers = list(routers)
    of_rows = [row_choices(row, own_tokens, own, layers, shape) for row, own_tokens, own in zip(rows, tokens, samples, strict=True)]
    own_tokens = [tp_slice(choices, tp_group, sequence_parallel=config.sequence_parallel) for choices in of_rows]
    counts = [tp_slice(num_samples(row), tp_group, sequence_parallel=config.sequence_parallel) for row in rows]
    replays = {layer: LayerReplay([choices[:, i] for choices in own_tokens], counts) for i, layer in enumerate(layers)}
    with asked(routers, replays):
        yield replays


@contextmanager
def recorded(chunks: Sequence[nn.Module], shape: RoutingShape) -> Iterator[dict[int, LayerRecord]]:
    """Record the choices of this rank's routers while the block runs, in passes without gradients."""
    routers = replayed_routers(chunks, shape)
    dtype = torch.uint8 if shape.dtype is np.uint8 else torch.int16  # torch has few kernels for uint16
    records = {layer: LayerRecord(dtype) for layer in routers}
    with asked(routers, records):
        yield records


def row_choices(row: PackedRow, tokens: PackedTokens, samples: Sequence[TrainSample], layers: Sequence[int], shape: RoutingShape) -> Tensor:
    """Return [L, m, K] int16 choices of m of the M layers on the row's device; `UNKNOWN` for padding, and in rows that do not count.

    Samples that share a token name the same experts for it, or none: the schedule shares no others.
    """
    wanted = np.full((tokens.num_tokens + 1, len(layers), shape.top_k), UNKNOWN, np.int16)
    for sample, slots in zip(samples, tokens.slots, strict=True):
        known = sample.routed_experts
        if known is not None:
            if len(known) >= len(sample.tokens) or known.shape[1:] != (len(shape.moe_layers), shape.top_k):
                largest = [len(sample.tokens) - 1, len(shape.moe_layers), shape.top_k]
                raise TrainerError(f"sample {sample.index}: routed_experts has the shape {list(known.shape)}; this model needs {largest}")
            wanted[slots[: len(known)]] = known[:, list(layers)]
    real = row.sequence_ids.cpu() >= 0
    return torch.from_numpy(wanted[torch.where(real, row.source, -1).numpy()]).to(row.input_ids.device)


def num_samples(row: PackedRow) -> Tensor:
    """Return [L] int64: how many samples have each token."""
    return (row.sequence_ids >= 0).long() if row.members is None else row.members.sum(0)


def tp_slice(of_row: Tensor, tp_group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Return this rank's part of [L, ...]: [L / tp, ...] under sequence parallelism."""
    return of_row.chunk(tp_group.size())[tp_group.rank()] if sequence_parallel else of_row


def recorded_parts(
    records: Mapping[int, LayerRecord],
    rows: Sequence[tuple[PackedRow, PackedTokens, Sequence[int]]],
    tp_group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
) -> dict[int, RecordedPart]:
    """Return this rank's records by position of the sample.

    `rows` have each micro-batch's part on this rank, all its tokens, and the positions of its samples; none if it does not count.
    """
    layers = tuple(records)
    parts: dict[int, RecordedPart] = {}
    for number, (row, tokens, samples) in enumerate(rows):
        if not layers or not samples:
            continue
        source = tp_slice(row.source, tp_group, sequence_parallel=sequence_parallel).numpy()
        experts = torch.stack([records[layer].choices[number] for layer in layers], dim=1).cpu().numpy()
        for position, slots in zip(samples, tokens.slots, strict=True):
            places = np.full(tokens.num_tokens + 1, -1)  # of the row's tokens in the sample; also covers padding
            places[slots] = np.arange(len(slots))
            own = places[source] >= 0
            parts[position] = RecordedPart(len(slots), places[source[own]], layers, experts[own])
    return parts


def assemble(parts: Sequence[RecordedPart], shape: RoutingShape) -> RoutedExperts:
    """Assemble [T - 1, M, K] of one sample from the parts of all ranks, each of which has other tokens or layers; at least one."""
    whole: RoutedExperts = np.zeros((parts[0].num_tokens, len(shape.moe_layers), shape.top_k), shape.dtype)
    num_known = 0
    for part in parts:
        whole[part.positions[:, None], part.layers] = part.experts
        num_known += part.experts.size
    assert num_known == whole.size, f"{num_known} of {whole.size} choices were recorded"
    return whole


def total_changed(replays: Iterable[Any], device: torch.device, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Return how many replayed choices differ from those of the replica's own routers, as a scalar tensor; a collective of `groups`."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for replay in replays:
        total += replay.num_changed
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
