"""Micro-batches: packed tokens, and the loss's inputs for each response token, as tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fuligo.errors import TrainerError
from fuligo.types import FloatArray, TrainSample


@dataclass(slots=True, frozen=True)
class PackedTokens:
    """Samples laid end to end, each without its last token, which predicts nothing. T tokens, S samples, N response tokens."""

    input_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, from 0 in every sample."""
    cu_seqlens: tuple[int, ...]
    """[S + 1] start of each sample, and T."""
    predicting_positions: Tensor
    """[N] int64 index into the T tokens: the hidden state there predicts the response token that follows it."""
    targets: Tensor
    """[N] int64 the response tokens."""
    response_lengths: tuple[int, ...]
    """[S]"""

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]


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


def pack_tokens(samples: Sequence[TrainSample], device: torch.device) -> PackedTokens:
    """Lay samples, each of at least two tokens, end to end.

    Raises:
        TrainerError: a sample starts with a response token, which nothing predicts.
    """
    for sample in samples:
        if sample.prompt_length < 1:
            raise TrainerError(f"sample {sample.index} has no token before its response: its first response token cannot be predicted")
    lengths = [len(sample.tokens) - 1 for sample in samples]
    cu_seqlens = (0, *accumulate(lengths))
    predicting = [np.arange(s.prompt_length - 1, n) + start for s, n, start in zip(samples, lengths, cu_seqlens)]
    return PackedTokens(
        input_ids=_to_device(np.concatenate([sample.tokens[:-1] for sample in samples]).astype(np.int64), device),
        position_ids=_to_device(np.concatenate([np.arange(n) for n in lengths]), device),
        cu_seqlens=cu_seqlens,
        predicting_positions=_to_device(np.concatenate(predicting), device),
        targets=_to_device(np.concatenate([sample.tokens[sample.prompt_length :] for sample in samples]).astype(np.int64), device),
        response_lengths=tuple(sample.response_length for sample in samples),
    )


def micro_batch(
    samples: Sequence[TrainSample], weights: Sequence[FloatArray], device: torch.device, *, counts: bool = True, share: float = 1.0
) -> MicroBatch:
    """Build one micro-batch of these samples.

    Args:
        samples: in the order in which they are laid end to end.
        weights: [R] for each sample.
        counts: False: all weights become 0.
        share: of the step, see `MicroBatch`.
    """
    counted = np.float32(counts)

    def column(arrays: Sequence[np.ndarray]) -> Tensor:
        return _to_device(np.concatenate(arrays).astype(np.float32), device)

    return MicroBatch(
        tokens=pack_tokens(samples, device),
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
