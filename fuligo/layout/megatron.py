"""Parallel layout of the Megatron trainer and the padding that it requires. Pure Python."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Layout:
    """Sizes of the parallel dimensions. Ranks are numbered as in Megatron: TP fastest, then CP, (EP within DP x CP,) DP, PP slowest."""

    tp: int = 1
    """Tensor-parallel size: ranks that share each matrix."""
    pp: int = 1
    """Pipeline-parallel size: number of stages."""
    vpp: int = 1
    """Virtual pipeline stages per pipeline rank."""
    cp: int = 1
    """Context-parallel size: ranks that share each sequence."""
    ep: int = 1
    """Expert-parallel size: rank groups that share the experts."""
    etp: int = 1
    """Expert tensor-parallel size: ranks that share each expert's matrices."""
    sequence_parallel: bool = False
    """Split norms and residuals along the sequence over the TP group; only with tp > 1."""
    num_layers_first_stage: int | None = None
    """Layers of the first stage; None for as many as the middle stages (likewise for the last stage)."""
    num_layers_last_stage: int | None = None
    num_ranks: int = 1

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.num_ranks // (self.tp * self.pp * self.cp)

    @property
    def row_multiple(self) -> int:
        """Tokens to which each sequence of a packed row is padded, so that CP ranks get equal chunks from both of its ends."""
        return 2 * self.cp if self.cp > 1 else 1

    def total_multiple(self, pad_multiple: int) -> int:
        """Return the tokens to which a packed row is padded: a multiple of `pad_multiple` and of the ranks that split it."""
        return math.lcm(pad_multiple, self.row_multiple, self.cp * (self.tp if self.sequence_parallel else 1))

    def padded_lengths(self, lengths: Iterable[int]) -> list[int]:
        """Return the padded lengths of the sequences of a packed row."""
        return [math.ceil(length / self.row_multiple) * self.row_multiple for length in lengths]

    def row_tokens(self, lengths: Iterable[int], pad_multiple: int) -> int:
        """Return the length of a packed row of these sequences, with all padding."""
        multiple = self.total_multiple(pad_multiple)
        return math.ceil(sum(self.padded_lengths(lengths)) / multiple) * multiple

    def replica_of(self, rank: int) -> int:
        """Return the data-parallel replica of a rank."""
        return rank // (self.tp * self.cp) % self.dp
