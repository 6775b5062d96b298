"""The exceptions that fuligo raises on purpose.

Everything a user can cause or must act on derives from `FuligoError`; its text names the value, the rule and the fix.
`ConfigError` and `DataError` end a command with exit code 2 (bad input), the others with 1 (failure at run time).
`assert` is kept for our own invariants.
"""

from __future__ import annotations


class FuligoError(Exception):
    """Base of all deliberate errors; its text is shown to the user without a traceback."""

    exit_code = 1


class ConfigError(FuligoError):
    """A flag, a config file or a combination of both is wrong; found before anything expensive starts.

    Several problems are reported at once: one line each.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(FuligoError):
    """A prompt file is missing, malformed, or lacks a key; names the file and the line."""

    exit_code = 2


class HookError(ConfigError):
    """A user-supplied function cannot be imported or its signature does not fit."""


class RolloutError(FuligoError):
    """Sampling as a whole cannot go on (for instance: every group was dropped); one bad sample is data, not an error."""


class EngineError(FuligoError):
    """An inference engine did not start, answered nonsense, or stopped answering; names the engine and the request."""


class RewardError(FuligoError):
    """A reward function raised, timed out, or returned something that is not a number."""


class TrainerError(FuligoError):
    """The trainer cannot run the model or the step (unsupported attention, non-finite loss, a lost rank)."""


class WeightSyncError(FuligoError):
    """Engine weights could not be brought to the trainer's version, or do not equal the trainer's."""


class CheckpointError(FuligoError):
    """A checkpoint is missing, truncated, or belongs to another architecture; names the directory and the file."""

    exit_code = 2


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; names the file system. Those before it are as they were."""

    exit_code = 1
