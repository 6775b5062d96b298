"""Micro-batches: packed tokens, and the loss's inputs for each response token, as tensors."""

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
    """Samples laid end to end, each without its last token, which predicts nothing. T tokens, S samples, N response tokens.

    With a tree, the row holds the common prefixes of samples once. Several response tokens may then be predicted at one position.
    """

    input_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, from 0 in every sample; [3, T] rotary positions in a row with images."""
    cu_seqlens: tuple[int, ...]
    """[S + 1] start of each sample, and T; with a tree [nodes + 1] start of each of its nodes, and T."""
    predicting_positions: Tensor
    """[N] int64 index into the T tokens: the hidden state there predicts the response token that follows it."""
    targets: Tensor
    """[N] int64 the response tokens."""
    sample_lengths: tuple[int, ...]
    """[S] tokens of each sample without its last."""
    response_lengths: tuple[int, ...]
    """[S]"""
    slots: tuple[NDArray[np.int64], ...]
    """[S][L] places of each sample's tokens in the row; samples that share a prefix have the same places for it."""
    tree: TokenTree | None = None
    """Tree of the tokens that samples share; None if they share none."""
    images: RowImages | None = None
    """Images of the row; None if it has none."""

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def num_sample_tokens(self) -> int:
        """Tokens of the samples; a shared token counts once for each sample that has it."""
        return sum(self.sample_lengths)


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """Packed tokens with the loss's inputs, each [N] float32."""

    tokens: PackedTokens
    sample_ids: Tensor
    """[N] int64 number of the sample within the micro-batch, 0 to S - 1."""
    loss_mask: Tensor
    """1 on tokens to train, else 0."""
    weights: Tensor
    """Weight of the token in the loss of the optimizer step (`algorithms.assign`); 0 where masked."""
    advantages: Tensor
    engine_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    values: Tensor | None
    """From the value model before the rollout's first optimizer step."""
    returns: Tensor | None
    share: float
    """1 / trajectories of the optimizer step, or 1 / its trained tokens (`StepDenominators.share`)."""


def pack_tokens(samples: Sequence[TrainSample], device: torch.device, *, shared: Sequence[int] = ()) -> PackedTokens:
    """Lay samples, each of at least two tokens, end to end.

    Args:
        samples: samples in the order of the row.
        device: device of the tensors.
        shared: tokens that each sample shares with the one before it, which the row then holds once; empty: none.

    Raises:
        TrainerError: a sample starts with a response token, which nothing predicts.
    """
    for sample in samples:
        if sample.prompt_length < 1:
            raise TrainerError(f"sample {sample.index} has no token before its response: its first response token cannot be predicted")
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
    """Build one micro-batch of these samples.

    Args:
        samples: samples in the order in which they are laid end to end.
        weights: [R] for each sample.
        counts: False: all weights become 0.
        share: share of the step, see `MicroBatch`.
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
    """Concatenate a column; all samples of a rollout have it, or none."""
    present = [array for array in arrays if array is not None]
    assert len(present) in (0, len(arrays))
    return column(present) if present else None


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
