"""Hooks that kill engines of their run at the moments that an environment variable names.

`KILL_ENGINES="sampling:1:0 training:2:1"` kills engine 0 while rollout 1 is sampled, and engine 1 while the trainer works on rollout 2."""

import os
import signal

from fuligo.types import Sample
from tests.e2e.processes import descendants


def keep_all(args, samples: list[Sample], **kwargs) -> tuple[bool, str | None]:
    """Kill an engine when the first group of a rollout is finished and others are in flight; keep all groups."""
    _kill("sampling", samples[0].metadata["start_rollout_id"])
    return True, None


def before_train_step(args, rollout_id: int, batch) -> None:
    _kill("training", rollout_id)


def _kill(turn: str, step: int) -> None:
    due = [moment for moment in os.environ["KILL_ENGINES"].split() if moment.startswith(f"{turn}:{step}:")]
    for moment in due:
        label = f" 0@{moment.rpartition(':')[2]} "
        for pid, command in descendants(os.getpid()).items():
            if "sglang.launch_server" in command and "engines/guard.py" not in command and label in f"{command} ":
                os.kill(pid, signal.SIGKILL)
    os.environ["KILL_ENGINES"] = " ".join(moment for moment in os.environ["KILL_ENGINES"].split() if moment not in due)
