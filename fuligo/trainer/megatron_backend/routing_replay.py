"""Routing replay: tokens go to the experts that the engine or an earlier pass chose for them.

Megatron-Core 0.16.1 has a hook for this: a router asks its `router_replay` for the choice of experts and computes their weights from its
current scores, so that gradients reach the router. Megatron's `RouterReplay` is not used: it ignores padding, records only the last
micro-batch, and must be told whether a pass is a recomputation, which a global switch cannot express while a pipeline has forward and
backward passes in flight.

Instead, each router counts its calls. All pipeline schedules run a stage's micro-batches in the same order in forward and backward passes.
A call without gradients is scoring, or the first pass of a layer that will be recomputed; a call with gradients is the recomputation, or
the only pass of a layer. Each kind of call therefore sees the micro-batches in order.
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
"""Recorded choice for padding and for tokens without a record, whose experts the router chooses."""


class _RouterHook(ABC):
    """Hook of one router, which Megatron calls once per pass of a micro-batch."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ChooseOwn | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the [tokens, K] scores and indices of the chosen experts."""
        assert default_compute_topk is not None
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.choose(own)
        return scores.gather(1, chosen), chosen

    @abstractmethod
    def choose(self, own: Tensor) -> Tensor:
        """Return the [tokens, K] experts to use instead of `own`, the router's choice."""


class LayerReplay(_RouterHook):
    """Replay of recorded choices in one router.

    Args:
        choices: for each micro-batch, [tokens, K] experts, `UNKNOWN` where the router chooses.
        counts: for each micro-batch, [tokens] number of samples that contain the token.
    """

    def __init__(self, choices: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        self._choices, self._counts = choices, counts
        self._num_calls = {False: 0, True: 0}
        self.num_changed = torch.zeros((), dtype=torch.int64, device=choices[0].device)
        """Number of replayed choices, over all samples, that the router would not have made; counted in calls with gradients."""

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
        """True if each kind of call was made for all micro-batches or for none, and at least one kind for all."""
        calls = set(self._num_calls.values())
        return len(self._choices) in calls and calls <= {0, len(self._choices)}


class LayerRecord(_RouterHook):
    """Record of one router's choices for each micro-batch, in a data type that holds an expert's index.

    Choices stay on the device until the end of the pass, because copying them to the host would synchronize in every layer.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.choices: list[Tensor] = []
        """[tokens, K] chosen experts of each micro-batch."""

    def choose(self, own: Tensor) -> Tensor:
        self.choices.append(own.to(self._dtype))
        return own


@dataclass(slots=True, frozen=True)
class RecordedPart:
    """Router choices for one sample on one rank."""

    num_tokens: int
    """Number of tokens of the whole sample, without its last token, which does not go through the model."""
    positions: np.ndarray
    """[n] positions of the rank's tokens in the sample."""
    layers: tuple[int, ...]
    """[m] indices of the rank's layers among the M layers with experts."""
    experts: RoutedExperts
    """[n, m, K] chosen experts."""


def replayed_routers(chunks: Iterable[nn.Module], shape: RoutingShape) -> dict[int, PackedRouter]:
    """Return this rank's routers by layer index among the M layers with experts, without MTP layers, which engines do not record."""
    found: dict[int, PackedRouter] = {}
    for chunk in chunks:
        for module in unwrapped(chunk).decoder.modules():
            if isinstance(module, PackedRouter):
                assert module.layer_number is not None
                found[shape.moe_layers.index(module.layer_number - 1)] = module
    return found


@contextmanager
def asked(routers: Mapping[int, PackedRouter], about: Mapping[int, LayerReplay | LayerRecord]) -> Iterator[None]:
    """Attach a replay or record to each router inside the block."""
    try:
        for layer, router in routers.items():
            router.router_replay = about[layer]
        yield
    finally:
        for router in routers.values():
            router.router_replay = None
    for layer, replay in about.items():
        assert not isinstance(replay, LayerReplay) or replay.is_complete, f"layer {layer} did not see every micro-batch"


@contextmanager
def replayed(
    chunks: Sequence[nn.Module],
    rows: Sequence[tuple[PackedRow, PackedTokens, Sequence[TrainSample]]],
    shape: RoutingShape,
    tp_group: dist.ProcessGroup,
) -> Iterator[dict[int, LayerReplay]]:
    """Inside the block, send the tokens of these micro-batches to the experts recorded in their samples. Yield the replays by layer."""
    routers = replayed_routers(chunks, shape)
    layers, sequence_parallel = list(routers), get_model_config(chunks[0]).sequence_parallel
    of_rows = [row_choices(row, tokens, samples, layers, shape) for row, tokens, samples in rows]
    own_tokens = [tp_slice(choices, tp_group, sequence_parallel=sequence_parallel) for choices in of_rows]
    counts = [tp_slice(num_samples(row), tp_group, sequence_parallel=sequence_parallel) for row, _, _ in rows]
    replays = {layer: LayerReplay([choices[:, i] for choices in own_tokens], counts) for i, layer in enumerate(layers)}
    with asked(routers, replays):
        yield replays


@contextmanager
def recorded(chunks: Sequence[nn.Module], shape: RoutingShape) -> Iterator[dict[int, LayerRecord]]:
    """Record the choices of this rank's routers inside the block, in passes without gradients. Yield the records by layer."""
    routers = replayed_routers(chunks, shape)
    dtype = torch.uint8 if shape.dtype is np.uint8 else torch.int16  # torch has few kernels for uint16
    records = {layer: LayerRecord(dtype) for layer in routers}
    with asked(routers, records):
        yield records


def row_choices(row: PackedRow, tokens: PackedTokens, samples: Sequence[TrainSample], layers: Sequence[int], shape: RoutingShape) -> Tensor:
    """Return the [L, m, K] int16 recorded choices for m of the M layers, on the row's device.

    The choice is `UNKNOWN` for padding, for tokens without a record and in repeated micro-batches. Samples that share a token have the same
    record for it, because the schedule shares only such tokens. Raises TrainerError if a record has the wrong shape.
    """
    wanted = np.full((tokens.num_tokens + 1, len(layers), shape.top_k), UNKNOWN, np.int16)
    for sample, slots in zip(samples, tokens.slots, strict=True):
        known = sample.routed_experts
        if known is not None:
            if len(known) >= len(sample.tokens) or known.shape[1:] != (len(shape.moe_layers), shape.top_k):
                raise TrainerError(
                    f"cannot replay the routing of sample {sample.index}: routed_experts has the shape {list(known.shape)}; it must be "
                    f"[at most {len(sample.tokens) - 1} tokens, {len(shape.moe_layers)} layers, {shape.top_k} experts per token]"
                )
            wanted[slots[: len(known)]] = known[:, list(layers)]
    real = row.sequence_ids.cpu() >= 0
    return torch.from_numpy(wanted[torch.where(real, row.source, -1).numpy()]).to(row.input_ids.device)


def num_samples(row: PackedRow) -> Tensor:
    """Return [L] int64: the number of samples that contain each token of the row."""
    return (row.sequence_ids >= 0).long() if row.members is None else row.members.sum(0)


def tp_slice(of_row: Tensor, tp_group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Return this TP rank's part of [L, ...]: [L / tp, ...] under sequence parallelism, else all."""
    return of_row.chunk(tp_group.size())[tp_group.rank()] if sequence_parallel else of_row


def recorded_parts(
    records: Mapping[int, LayerRecord],
    rows: Sequence[tuple[PackedRow, PackedTokens, Sequence[int]]],
    tp_group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
) -> dict[int, RecordedPart]:
    """Return this rank's part of the record of each sample, by the sample's position.

    Args:
        rows: for each micro-batch, its part on this rank, all its tokens, and the positions of its samples (empty if it is repeated).
    """
    layers = tuple(records)
    parts: dict[int, RecordedPart] = {}
    for number, (row, tokens, samples) in enumerate(rows):
        if not layers or not samples:
            continue
        source = tp_slice(row.source, tp_group, sequence_parallel=sequence_parallel).numpy()
        experts = torch.stack([records[layer].choices[number] for layer in layers], dim=1).cpu().numpy()
        for position, slots in zip(samples, tokens.slots, strict=True):
            places = np.full(tokens.num_tokens + 1, -1)  # position in the sample of each token in the micro-batch, and of padding
            places[slots] = np.arange(len(slots))
            own = places[source] >= 0
            parts[position] = RecordedPart(len(slots), places[source[own]], layers, experts[own])
    return parts


def assemble(parts: Sequence[RecordedPart], shape: RoutingShape) -> RoutedExperts:
    """Assemble the [T - 1, M, K] record of one sample from the parts of all ranks (at least one), which have disjoint tokens or layers."""
    whole: RoutedExperts = np.zeros((parts[0].num_tokens, len(shape.moe_layers), shape.top_k), shape.dtype)
    num_known = 0
    for part in parts:
        whole[part.positions[:, None], part.layers] = part.experts
        num_known += part.experts.size
    assert num_known == whole.size, f"{num_known} of {whole.size} choices were recorded"
    return whole


def total_changed(replays: Iterable[Any], device: torch.device, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Return, as a scalar tensor, how many replayed choices the replica's routers would not have made. A collective of `groups`."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for replay in replays:
        total += replay.num_changed
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
