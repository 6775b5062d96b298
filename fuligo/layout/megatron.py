"""How Megatron's ranks share the model and the work: the sizes of its parallel dimensions. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Layout:
    """Sizes of the dimensions; ranks are numbered TP fastest, then CP, (EP within DP x CP,) DP, and PP slowest, as Megatron does."""

    tp: int = 1
    """Ranks that share each matrix."""
    pp: int = 1
    """Stages that the layers are cut into."""
    vpp: int = 1
    """Interleaved stages of each pipeline rank."""
    cp: int = 1
    """Ranks that share each sequence."""
    ep: int = 1
    """Groups of ranks that the experts are spread over."""
    etp: int = 1
    """Ranks that share each expert's matrices."""
    sequence_parallel: bool = False
    """Norms and residuals are split along the sequence over the TP group; only with tp > 1."""
    num_layers_first_stage: int | None = None
    """None: as many as the middle stages."""
    num_layers_last_stage: int | None = None
    num_ranks: int = 1

    @property
    def dp(self) -> int:
        """Ranks that train on different samples."""
        return self.num_ranks // (self.tp * self.pp * self.cp)

    @property
    def row_multiple(self) -> int:
        """Tokens that the length of every sequence of a packed row is a multiple of, so that CP ranks get equal halves of its two ends."""
        return 2 * self.cp if self.cp > 1 else 1

    def total_multiple(self, pad_multiple: int) -> int:
        """Tokens that the length of a packed row is a multiple of: of `pad_multiple`, and of what its ranks divide it by."""
        return math.lcm(pad_multiple, self.row_multiple, self.cp * (self.tp if self.sequence_parallel else 1))

    def padded_lengths(self, lengths: Iterable[int]) -> list[int]:
        """Of the sequences of a packed row, with padding."""
        return [math.ceil(length / self.row_multiple) * self.row_multiple for length in lengths]

    def row_tokens(self, lengths: Iterable[int], pad_multiple: int) -> int:
        """Of a packed row of these sequences, with all padding."""
        multiple = self.total_multiple(pad_multiple)
        return math.ceil(sum(self.padded_lengths(lengths)) / multiple) * multiple

    def replica_of(self, rank: int) -> int:
        """Which data-parallel replica a rank is part of."""
        return rank // (self.tp * self.cp) % self.dp
