"""Failures of rewards."""

from enum import StrEnum

from fuligo.errors import RewardError


class FailureReason(StrEnum):
    """Reason why no reward could be computed; `RewardRunner.failures` counts the failed samples by reason."""

    NO_REWARD = "no_reward"
    """Neither a reward type nor a custom reward applies to the sample."""
    BAD_LABEL = "bad_label"
    BAD_METADATA = "bad_metadata"
    TIMEOUT = "timeout"
    RAISED = "raised"
    BAD_VALUE = "bad_value"
    """The reward is neither a finite number nor a dict with one under --reward-key."""
    WORKER_DIED = "worker_died"
    REMOTE = "remote"
    NO_WORKER = "no_worker"
    """A worker process of a judge did not start."""


class RewardFailure(RewardError):
    """Raised if a reward cannot be computed. The sample is marked failed and the run continues."""

    def __init__(self, reason: FailureReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class NoVerdictError(RewardFailure):
    """Raised if a judge hangs, dies or runs out of memory on a response.

    The response counts as wrong, so that the policy cannot gain by hanging the judge.
    """
