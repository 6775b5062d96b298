"""Base class of advantage estimators. Imports neither numpy nor torch, so that the checks of flags can use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from fuligo.algorithms.policy_loss import Clip, PolicyTerms, ppo_loss
from fuligo.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from torch import Tensor

    from fuligo.algorithms.policy_loss import Segments
    from fuligo.algorithms.rewards import Float64Array, Rewards


class Estimator(ABC):
    """Advantage estimator with its policy loss.

    Subclasses are in `fuligo.algorithms.estimators`, one per module, and import numpy and torch only for type checking or inside
    functions. The class attributes tell the checks of flags what the estimator uses.
    """

    has_group_baseline: ClassVar[bool] = False
    """True if it compares a response with the others of its group, so that a group of one gives no advantage."""
    divides_by_std: ClassVar[bool] = False
    """True if it divides by the group's standard deviation, unless --disable-grpo-std-normalization."""
    uses_kl_coef: ClassVar[bool] = False
    """True if it subtracts the KL to the reference from the rewards or advantages (--kl-coef)."""
    uses_gamma: ClassVar[bool] = False
    """True if it discounts rewards from token to token (--gamma)."""
    uses_values: ClassVar[bool] = False
    """True if it needs a value model; `advantages` also sets `returns` of every sample."""
    needs_whitening: ClassVar[bool] = False
    """True if it requires --normalize-advantages."""
    has_dual_clip: ClassVar[bool] = True
    """True if it applies `Clip.dual` in its policy loss (--eps-clip-c)."""
    ratio_level: ClassVar[Literal["token", "sequence"]] = "token"
    """Level of the probability ratio that the policy loss clips: one per token, or one per sequence."""

    @abstractmethod
    def advantages(self, rewards: Rewards, settings: AdvantageSettings) -> list[Float64Array]:
        """Return the [R] advantages of every sample, before whitening."""

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip, segments: Segments) -> PolicyTerms:
        """Compute the loss of every token; PPO's clipped surrogate unless overridden.

        Tensors are [N]; only `logprobs` has a gradient. `old_logprobs` are the log-probabilities in the ratio's denominator.
        """
        return ppo_loss(logprobs, old_logprobs, advantages, clip)
