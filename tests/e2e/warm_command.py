"""Command in a fresh process, whose engine and ranks fork from it: `python -m tests.e2e.warm_command ROOM ARGUMENT ...`.

Unlike a forked command (`warm_start`), it has an environment and a hash seed of its own, and may be the first process of a namespace.
"""

import runpy
import sys

from tests.e2e.warm_children import fork_children_warm, import_all
from tests.e2e.warm_start import MODULES

if __name__ == "__main__":
    del sys.argv[1]
    import_all(MODULES)
    runpy.run_module(fork_children_warm(), run_name="__main__", alter_sys=True)
