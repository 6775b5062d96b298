"""Ray worker that is forked from a process of the tests: `python -m tests.e2e.warm_worker SCRIPT ARGUMENT ...`.

Otherwise, the actors of a run (its ranks and the agents of its nodes) would import torch and transformers, and their engines SGLang. Ray
starts workers with the interpreter of the job's runtime environment; here that is this module, which stands in for a fork. A worker with
variables that change imports starts fresh.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from tests.e2e.stand_ins import Broker, stand_in
from tests.e2e.warm_children import Children

MODULE = "tests.e2e.warm_worker"
ADDRESS = "FULIGO_TEST_WORKERS"
"""Variable with the path of the tests' socket."""


def serve_workers(children: Children, path: Path) -> dict[str, str]:
    """Fork workers of Ray for stand-ins at this socket; return the variables of a run whose workers are forked."""
    Broker(children, path)
    job = {"runtime_env": {"py_executable": f"{sys.executable} -m {MODULE}"}}
    return {ADDRESS: str(path), "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}


def main() -> None:
    """Stand in for a forked worker; in the fork, or if the worker may not be forked, run it here."""
    address = os.environ.pop(ADDRESS, None)
    if address is not None:
        request = {
            "command": [sys.executable, "-m", MODULE, *sys.argv[1:]],
            "environment": dict(os.environ),
            "directory": str(Path.cwd()),
            "descriptors": [0, 1, 2],
            "group": -1,
            "session": True,
            "ignores_interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }
        stand_in(address, json.dumps(request))
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
