"""Exceptions that fuligo raises deliberately.

Every error that a user can cause or must act on derives from `FuligoError`; its text names the value, the rule and the fix.
Commands exit with its `exit_code`: 2 for bad input (`ConfigError`, `DataError`, `CheckpointError`), 1 for a failure at run time.
`assert` is reserved for internal invariants.
"""


class FuligoError(Exception):
    """Base of all deliberate errors; its text is shown to the user without a traceback."""

    exit_code = 1


class ConfigError(FuligoError):
    """Raised if a flag, the config file or their combination is wrong, before anything expensive starts.

    Several problems are reported at once, one per line.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(FuligoError):
    """Raised if a prompt file is missing or malformed, or lacks a key; names the file and the line."""

    exit_code = 2


class DataChangedError(FuligoError):
    """Raised if a prompt file changes or disappears during a run. Not a `DataError`, which --skip-bad-rows may ignore."""


class HookError(ConfigError):
    """Raised if a user function cannot be imported or does not fit its call."""


class RolloutError(FuligoError):
    """Raised if sampling as a whole cannot continue, for instance because every group was dropped; a failed sample is only recorded."""


class EngineError(FuligoError):
    """Raised if an engine does not start, gives an invalid answer or stops answering; names the engine and the request."""


class RewardError(FuligoError):
    """Raised if a reward function raises, times out, or does not return a usable reward."""


class TrainerError(FuligoError):
    """Raised if the trainer fails (unsupported attention, non-finite loss, a lost rank)."""


class RankError(TrainerError):
    """Raised if a trainer rank is lost, hangs, or crashes for a reason that may not recur in a restarted trainer (--max-restarts)."""

    def __init__(self, event: str, advice: str) -> None:
        """Create the error.

        Args:
            event: names the rank, its host and the command, without a period
            advice: sentences on where to look and how to continue
        """
        super().__init__(f"{event}. {advice}")
        self.event = event


class WeightSyncError(FuligoError):
    """Raised if weights cannot be synced to the engines, or an engine's weights differ from the trainer's."""


class RunsFailedError(FuligoError):
    """Raised if some runs of `fuligo train-many` fail; names them."""


class CheckpointError(FuligoError):
    """Raised if a checkpoint is missing, truncated, or of another architecture; names the directory and the file."""

    exit_code = 2


class CheckpointWriteError(CheckpointError):
    """Raised if a checkpoint cannot be written; names the file system. Earlier checkpoints are unchanged."""

    exit_code = 1
