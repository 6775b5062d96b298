"""Settings of the advantage estimators. Imports neither numpy nor torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fuligo.types import TrainSample

STD_EPSILON = 1e-6
"""Default of `std_epsilon`."""

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
"""Estimator of the KL to the reference; see `kl.kl_estimate`."""

AdvantageFn = Callable[["list[TrainSample]"], "Sequence[ArrayLike]"]
"""Custom estimator: samples -> [R] advantages of every sample."""


@dataclass(slots=True, frozen=True)
class AdvantageSettings:
    """Settings for turning rewards into advantages and a rollout into optimizer steps."""

    samples_per_step: int
    """Number of trajectories per optimizer step (--global-batch-size)."""
    num_steps: int = 1
    """Number of optimizer steps per rollout."""
    estimator: str = "grpo"
    """Key of `ESTIMATORS`."""
    normalize_rewards: bool = True
    """True to subtract the group's baseline, for estimators with `has_group_baseline`. If False, `divide_by_std` has no
    effect."""
    divide_by_std: bool = True
    """True to divide by the group's standard deviation, for estimators with `divides_by_std`."""
    std_epsilon: float = STD_EPSILON
    """Constant that is added to every standard deviation before dividing by it; same unit as the reward."""
    whiten: bool = False
    """True to whiten the advantages over all unmasked tokens of the rollout (after distillation)."""
    gamma: float = 1.0
    """Discount per token, for estimators with `uses_gamma`."""
    rewards_by_turn: bool = False
    """True to place each reward in `TrainSample.turn_rewards` at the end of its turn, for estimators with `uses_gamma` (--turn-rewards)."""
    lambd: float = 1.0
    """Lambda of generalized advantage estimation: 1 gives Monte Carlo returns, 0 one-step temporal differences."""
    kl_coef: float = 0.0
    """Weight of the KL penalty on rewards, for estimators with `uses_kl_coef`."""
    kl_type: KlType = "k1"
    """Estimator of the KL in the penalty (--kl-loss-type)."""
    old_from_engine: bool = False
    """True to take the engine's log-probabilities as the old policy's (--use-rollout-logprobs)."""
    custom: AdvantageFn | None = None
    """Function whose advantages replace the estimator's. Distillation and whitening still apply; a value model keeps the estimator's
    returns."""
    distillation: float | None = None
    """Weight of the reverse KL to a teacher, which is subtracted from the advantages; None without a teacher."""
