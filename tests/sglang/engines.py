"""SGLang servers for tests on a CPU: the interpreter and the settings."""

import os
import shutil
import subprocess
from pathlib import Path

from fuligo.config.secret import Environment
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import (
    AHEAD_VARIABLE,
    CPU_ENVIRONMENT,
    OWN_ENVIRONMENT,
    PORTS_PER_ENGINE,
    ServerPorts,
    ServerSettings,
)

ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"
SPAWNING = {"PYTHONPATH": str(STUBS)}
"""Environment of a server that starts its processes as on a GPU: each imports SGLang again, for 7 s of CPU time."""
AHEAD = {**SPAWNING, "FULIGO_TEST_FORKED_ENGINE": "1"}
"""Environment of a server that forks the processes that it starts ahead, and hands them to SGLang as on a GPU."""
ENVIRONMENT = {**AHEAD, AHEAD_VARIABLE: ""}
"""Environment of a server that forks its processes when SGLang starts them."""

MEMORY = {"mem_fraction_static": 0.5}
"""SGLang ends if, while it loads, other processes of the machine take this fraction of the free memory."""


def sglang_python() -> Path | None:
    """Return the interpreter that has SGLang: FULIGO_SGLANG_PYTHON, else that of `make install-sglang`, else None."""
    python = shutil.which(os.environ.get("FULIGO_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    return Path(python) if python else None


def server_settings(name: str, model: Path, claims: PortClaims, log_file: Path, **changes: object) -> ServerSettings:
    """Return the settings of a server of one process with a small cache."""
    python = sglang_python()
    assert python is not None
    ports = ServerPorts(claims.claim(), claims.claim(PORTS_PER_ENGINE), claims.claim())
    given: dict = {"tp_size": 1, "pp_size": 1, "arguments": {}, "worker_type": "regular", "device": "cpu", "host": "127.0.0.1"}
    given |= {"python": str(python), "environment": ENVIRONMENT, "start_timeout_s": 300.0}
    given |= changes
    given |= {"arguments": {**MEMORY, **given["arguments"]}, "environment": Environment(given["environment"])}
    return ServerSettings(name=name, model_path=str(model), ports=ports, log_file=log_file, **given)


def finished_program(name: str, *arguments: object, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this directory on SGLang's interpreter to its end.

    It has the environment of an engine and, like it, forks from the process that has imported SGLang (`tests/e2e/warm_servers.py`).

    Args:
        text: its standard input
        variables: added to its environment
    """
    command = [str(sglang_python()), str(Path(__file__).with_name(f"{name}.py")), *map(str, arguments)]
    environment = {**os.environ, **OWN_ENVIRONMENT, **CPU_ENVIRONMENT, **ENVIRONMENT, **variables}
    return subprocess.run(command, env=environment, input=text, capture_output=True, text=True, check=False, timeout=500)


def run_program(name: str, *arguments: object, text: str = "", **variables: str) -> list[str]:
    """Run a program as `finished_program` does; return the lines of its standard output. It must exit with 0."""
    done = finished_program(name, *arguments, text=text, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
