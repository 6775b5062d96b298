"""PYTHONPATH of a run's processes."""

import os
from collections.abc import Mapping

VARIABLE = "PYTHONPATH"


def with_inherited_path(given: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `--env`; if PYTHONPATH is one of them, append the directories of this process's PYTHONPATH to it.

    Ranks must import the fuligo of the command that starts them, which they may find only through PYTHONPATH.
    """
    if VARIABLE not in given:
        return dict(given)
    directories = [directory for path in (given[VARIABLE], environment.get(VARIABLE, "")) for directory in path.split(os.pathsep)]
    return {**given, VARIABLE: os.pathsep.join(dict.fromkeys(directory for directory in directories if directory))}
