"""Environment of `--env` in the process of a command, before it imports any user code."""

import os
import sys

from fuligo.config import Config
from fuligo.config.python_path import VARIABLE, with_inherited_path


def apply_environment(config: Config) -> None:
    """Set the variables of `--env` in this process, and add the directories of its PYTHONPATH to `sys.path`, as Python does at its start.

    A value that refers to an unset variable is left out here; the checks before the start report it.
    """
    given = {name: value for name in config.cluster.env if (value := config.cluster.env.get(name)) is not None}
    os.environ.update(with_inherited_path(given))
    added = [directory for directory in given.get(VARIABLE, "").split(os.pathsep) if directory and directory not in sys.path]
    sys.path[1:1] = added
