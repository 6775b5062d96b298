"""Micro-batches as tensors: packed tokens and the loss inputs of every response token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuligo.errors import TrainerError
from fuligo.models.token_tree import TokenTree
from fuligo.models.vision.forward import RowImages, row_images
from fuligo.models.vision.positions import row_positions
from fuligo.trainer.shared_prefixes import lay_out
from fuligo.types import FloatArray, TrainSample


@dataclass(slots=True, frozen=True)
class PackedTokens:
    """Samples packed into one row, each without its last token, which predicts nothing. Axes: T tokens, S samples, N response tokens.

    With a tree, the row stores shared prefixes only once, and one position may predict several response tokens.
    """

    input_ids: Tensor
    """[T] int64 tokens of the row."""
    position_ids: Tensor
    """[T] int64, counted from 0 in every sample; [3, T] rotary positions if the row has images."""
    cu_seqlens: tuple[int, ...]
    """[S + 1] start of each sample, then T; with a tree, [nodes + 1] start of each tree node, then T."""
    predicting_positions: Tensor
    """[N] int64 row position whose hidden state predicts the response token."""
    targets: Tensor
    """[N] int64 response tokens."""
    sample_lengths: tuple[int, ...]
    """[S] number of tokens of each sample, without its last token."""
    response_lengths: tuple[int, ...]
    """[S] number of response tokens of each sample."""
    slots: tuple[NDArray[np.int64], ...]
    """[S][L] row positions of each sample's tokens; samples that share a prefix have the same positions for it."""
    tree: TokenTree | None = None
    """Tree of the shared prefixes; None if no prefix is shared."""
    images: RowImages | None = None
    """Images of the row; None if it has none."""

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def num_sample_tokens(self) -> int:
        """Number of tokens of all samples; a token that k samples share counts k times."""
        return sum(self.sample_lengths)


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """Packed tokens and their loss inputs, [N] float32 unless stated otherwise; None if the samples do not have them."""

    tokens: PackedTokens
    sample_ids: Tensor
    """[N] int64 index of each token's sample in the micro-batch, 0 to S - 1."""
    loss_mask: Tensor
    """1 on tokens to train, else 0."""
    weights: Tensor
    """Weight of each token in the loss of the optimizer step (`algorithms.assign`); 0 where masked."""
    advantages: Tensor
    engine_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    values: Tensor | None
    """Predictions of the value model before the rollout's first optimizer step."""
    returns: Tensor | None
    share: float
    """1 / (number of trajectories in the optimizer step), or 1 / (number of its trained tokens); see `StepDenominators.share`."""


def pack_tokens(samples: Sequence[TrainSample], device: torch.device, *, shared: Sequence[int] = ()) -> PackedTokens:
    """Pack samples, each of at least two tokens, into one row.

    Args:
        shared: number of leading tokens that each sample shares with the previous one, stored once; empty if nothing is shared.

    Raises:
        TrainerError: a sample starts with a response token, which no token predicts.
    """
    for sample in samples:
        if sample.prompt_length < 1:
            raise TrainerError(
                f"cannot train on sample {sample.index}: it has no token before its response, so nothing predicts the first response "
                "token; give its prompt at least one token"
            )
    lengths = [len(sample.tokens) - 1 for sample in samples]
    layout = lay_out(lengths, shared) if any(shared) else None
    starts = (0, *accumulate(lengths))
    slots = [np.arange(start, end) for start, end in pairwise(starts)] if layout is None else layout.slots
    first_new = [0] * len(samples) if layout is None else shared
    new = [slice(first, -1) for first in first_new]
    return PackedTokens(
        input_ids=_to_device(np.concatenate([sample.tokens[own] for sample, own in zip(samples, new)]).astype(np.int64), device),
        position_ids=_to_device(_positions(samples, first_new), device),
        cu_seqlens=starts if layout is None else layout.tree.starts,
        predicting_positions=_to_device(np.concatenate([own[s.prompt_length - 1 :] for s, own in zip(samples, slots)]), device),
        targets=_to_device(np.concatenate([sample.tokens[sample.prompt_length :] for sample in samples]).astype(np.int64), device),
        sample_lengths=tuple(lengths),
        response_lengths=tuple(sample.response_length for sample in samples),
        slots=tuple(slots),
        tree=None if layout is None else layout.tree,
        images=row_images(starts, [sample.images for sample in samples], device),
    )


def _positions(samples: Sequence[TrainSample], first_new: Sequence[int]) -> np.ndarray:
    """Return the row's position ids: [T], or [3, T] if a sample has images."""
    lengths, images = [len(sample.tokens) - 1 for sample in samples], [sample.images for sample in samples]
    if any(first_new):
        assert not any(images), "prefixes are not shared where samples have images"
        return np.concatenate([np.arange(first, n) for first, n in zip(first_new, lengths)])
    return row_positions(lengths, images)


def micro_batch(
    samples: Sequence[TrainSample],
    weights: Sequence[FloatArray],
    device: torch.device,
    *,
    counts: bool = True,
    share: float = 1.0,
    shared: Sequence[int] = (),
) -> MicroBatch:
    """Build a micro-batch of these samples.

    Args:
        weights: [R] loss weights of each sample's response tokens.
        counts: False for a repeated micro-batch, whose loss mask and weights are set to 0.
        share: see `MicroBatch.share`.
        shared: as in `pack_tokens`.
    """
    counted = np.float32(counts)

    def column(arrays: Sequence[np.ndarray]) -> Tensor:
        return _to_device(np.concatenate(arrays).astype(np.float32), device)

    return MicroBatch(
        tokens=pack_tokens(samples, device, shared=shared),
        sample_ids=_to_device(np.repeat(np.arange(len(samples)), [sample.response_length for sample in samples]), device),
        loss_mask=column([sample.loss_mask * counted for sample in samples]),
        weights=column([of_sample * counted for of_sample in weights]),
        advantages=column([sample.advantages for sample in samples]),
        engine_logprobs=column([sample.engine_logprobs for sample in samples]),
        old_logprobs=_optional([sample.old_logprobs for sample in samples], column),
        ref_logprobs=_optional([sample.ref_logprobs for sample in samples], column),
        teacher_logprobs=_optional([sample.teacher_logprobs for sample in samples], column),
        values=_optional([sample.values for sample in samples], column),
        returns=_optional([sample.returns for sample in samples], column),
        share=share,
    )


def _optional(arrays: list[FloatArray | None], column: Callable[[Sequence[np.ndarray]], Tensor]) -> Tensor | None:
    """Concatenate a column that either all samples of a rollout have or none; None if none has it."""
    present = [array for array in arrays if array is not None]
    assert len(present) in (0, len(arrays))
    return column(present) if present else None


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
