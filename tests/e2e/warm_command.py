"""Command in a fresh process, whose engine and ranks fork from it: `python -m tests.e2e.warm_command ROOM ARGUMENT ...`.

Unlike a forked command (`warm_start`), it has an environment and a hash seed of its own, and may be the first process of a namespace.
"""

import os
import runpy
import sys

from fuligo import cli
from tests.e2e.warm_children import fork_children_warm, import_all
from tests.e2e.warm_start import MODULES


def fork_below_init() -> None:
    """Let the engine and the ranks fork once the command continues below process 1: they must become its children."""
    continue_below_init = cli.continue_below_init

    def continue_and_fork() -> None:
        cli.continue_below_init = continue_below_init
        continue_below_init()
        command = os.getpid()
        module = fork_children_warm()
        if os.getpid() != command:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit()

    cli.continue_below_init = continue_and_fork


if __name__ == "__main__":
    del sys.argv[1]
    import_all(MODULES)
    if os.getpid() == 1:
        fork_below_init()
        runpy.run_module("fuligo", run_name="__main__", alter_sys=True)
    else:
        runpy.run_module(fork_children_warm(), run_name="__main__", alter_sys=True)
