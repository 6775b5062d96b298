"""Exceptions that fuligo raises deliberately.

Every error that a user can cause or must act on derives from `FuligoError`; its text names the value, the rule and the fix.
`ConfigError` and `DataError` end a command with exit code 2 (bad input), the others with 1 (failure at run time).
`assert` is reserved for internal invariants.
"""


class FuligoError(Exception):
    """Base of all deliberate errors; its text is shown to the user without a traceback."""

    exit_code = 1


class ConfigError(FuligoError):
    """Wrong flag, config file or combination of both, found before anything expensive starts.

    Several problems are reported at once, one per line.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(FuligoError):
    """Missing or malformed prompt file, or missing key; names the file and the line."""

    exit_code = 2


class DataChangedError(FuligoError):
    """Prompt file whose content changed or was lost while a run read it; not a `DataError`, which may be one bad row among good ones."""


class HookError(ConfigError):
    """User function that cannot be imported or does not fit its call."""


class RolloutError(FuligoError):
    """Sampling as a whole cannot continue (for instance, every group was dropped); one bad sample is data, not an error."""


class EngineError(FuligoError):
    """Inference engine that did not start, gave an invalid answer or stopped answering; names the engine and the request."""


class RewardError(FuligoError):
    """Reward function that raised, timed out, or did not return a number."""


class TrainerError(FuligoError):
    """Failure of the trainer (unsupported attention, non-finite loss, a lost rank)."""


class RankError(TrainerError):
    """Trainer rank that was lost, hangs or crashed for a reason that may not recur in a restarted trainer (--max-restarts)."""

    def __init__(self, event: str, advice: str) -> None:
        """Create the error.

        Args:
            event: names the rank, its host and the command, without a full stop
            advice: sentences on where to look and how to continue
        """
        super().__init__(f"{event}. {advice}")
        self.event = event


class WeightSyncError(FuligoError):
    """Engine weights that could not be synced, or differ from the trainer's."""


class RunsFailedError(FuligoError):
    """Failure of some of the runs of `fuligo train-many`; names them."""


class CheckpointError(FuligoError):
    """Checkpoint that is missing, truncated, or of another architecture; names the directory and the file."""

    exit_code = 2


class CheckpointWriteError(CheckpointError):
    """Checkpoint that could not be written; names the file system. Earlier checkpoints are unchanged."""

    exit_code = 1
