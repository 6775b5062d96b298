"""Multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2) on packed rows: shifted tokens and loss, for all backends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuligo.trainer.batch import PackedTokens

Places = NDArray[np.int64]
PADDING_ID = 0
"""Token id of padding. Any id would do, because no other token attends to it and nothing is predicted there."""


@dataclass(slots=True, frozen=True)
class MTPTraining:
    """Settings of the MTP loss."""

    factor: float
    """Factor of the MTP loss (`--mtp-loss-scaling-factor`)."""
    is_joint: bool
    """True: the loss also trains the model, its embedding and its head; otherwise hidden states, embedding and head are detached."""


@dataclass(slots=True, frozen=True)
class LaterTokens:
    """Inputs and targets of the MTP layer at depth k for a rank's L tokens: the token k positions later, and the token after that."""

    input_ids: Tensor
    """[1, L] int64 token k positions later in the same sequence; padding beyond its end."""
    local_rows: Tensor
    """[m] int64 indices, among the L tokens, of those whose hidden states predict a response token of the same sequence."""
    local_ids: Tensor
    """[m] int64 indices into the N response tokens: the tokens that these hidden states predict."""


def later_tokens(tokens: PackedTokens, depth: int, *, source: Places | None = None, rows: Places | None = None) -> LaterTokens:
    """Shift a row's tokens for the MTP layer at `depth`, counted from 1.

    Samples that share a token also have the same token `depth` positions later, because the schedule does not share the end of a prefix.

    Args:
        source: [L] index in the micro-batch of each token on this rank, -1 for padding; None: the rank has the whole micro-batch in order.
        rows: [T] inverse of `source`, -1 for tokens on other ranks; None if `source` is None.
    """
    device, num_tokens = tokens.input_ids.device, tokens.num_tokens
    source = np.arange(num_tokens) if source is None else source
    rows = np.arange(num_tokens) if rows is None else rows
    later = np.full(num_tokens + 1, num_tokens)
    earlier_rows: list[Places] = []
    for slots, num_predicted in zip(tokens.slots, tokens.response_lengths, strict=True):
        later[slots[:-depth]] = slots[depth:]
        earlier = np.arange(len(slots) - num_predicted, len(slots)) - depth
        earlier_rows.append(np.where(earlier >= 0, rows[slots[earlier.clip(min=0)]], -1))
    local = np.concatenate(earlier_rows)
    local_ids = np.flatnonzero(local >= 0)
    return LaterTokens(
        input_ids=with_padding(tokens.input_ids)[torch.from_numpy(later[source]).to(device)][None],
        local_rows=torch.from_numpy(local[local_ids]).to(device),
        local_ids=torch.from_numpy(local_ids).to(device),
    )


def with_padding(input_ids: Tensor) -> Tensor:
    """Append a padding token to [T] tokens, so that index -1 is padding."""
    return torch.cat([input_ids, input_ids.new_tensor([PADDING_ID])])


def mtp_loss(logprobs: Iterable[Tensor], later: Sequence[LaterTokens], weights: Tensor) -> Tensor:
    """Return sum_k sum_n weights_n * -log p_k(token n) / K: the cross-entropy of response tokens under each MTP layer k.

    Layer k continues from a hidden state that does not include the last k tokens before the response token; it gets only their embeddings.
    A token counts for layer k only if that hidden state is in the same sequence. Logits are not divided by the temperature. The scalar is
    this context-parallel rank's part of the sum, before `--mtp-loss-scaling-factor`.

    Args:
        logprobs: for each layer, [m] log-probabilities of the response tokens `local_ids` of its entry in `later`.
        weights: [N] float32 token weights in the loss of the optimizer step; 0 where masked.
    """
    total = torch.zeros((), device=weights.device)
    for found, tokens in zip(logprobs, later, strict=True):
        total = total - (weights[tokens.local_ids] * found).sum()
    return total / len(later)
