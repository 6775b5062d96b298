"""Probability ratios of tokens and sequences. Axes: N response tokens of a packed micro-batch, S samples. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats. exp(20) is 5e8: far beyond any clip bound, and still finite when it is multiplied by an advantage of 0."""


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) with log_ratio clamped to +-LOG_RATIO_LIMIT, so that it is finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(slots=True, frozen=True)
class Segments:
    """Sample boundaries in a packed micro-batch."""

    loss_mask: Tensor
    """[N] 0 or 1."""
    sample_ids: Tensor
    """[N] int64 in [0, num_samples). A sample's tokens are all in one micro-batch."""
    num_samples: int
    """S"""

    def mean(self, values: Tensor) -> Tensor:
        """Average over each sample's unmasked tokens and broadcast to all its tokens; 0 for a sample without any.

        For log-ratios this is the logarithm of the geometric mean of the sample's token ratios.

        Args:
            values: [N]

        Returns:
            [N]
        """
        mask = self.loss_mask.to(values.dtype)
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, values * mask)
        counts = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, mask)
        return (sums / counts.clamp(min=1))[self.sample_ids]
