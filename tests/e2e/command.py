"""The `fuligo` command, run in a process of its own with flags and an environment."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.processes import interrupt
from tests.e2e.warm_children import ROOM
from tests.e2e.warm_start import WarmStart

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 480.0
HAS_CUDA = shutil.which("nvidia-smi") is not None
"""CUDA's libraries start threads when torch is imported, and a process with threads cannot fork."""


def train_command(checkpoint: Path, prompts: Path, **changes: object) -> list[str]:
    """Return `train` with the flags of a small run, changed by name (with underscores).

    True gives a switch, a list several values; None leaves a flag out. The random reward keeps gradients away from zero.
    """
    flags: dict[str, object] = {
        "device": "cpu",
        "hf_checkpoint": checkpoint,
        "prompt_data": prompts,
        "input_key": "prompt",
        "label_key": "label",
        "apply_chat_template": True,
        "rollout_shuffle": True,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 12,
        "rm_type": "random",
        "num_rollout": 3,
        "lr": 1e-3,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 256,
        "embedded_num_threads": 1,
        "progress": "plain",
        **changes,
    }
    return ["train", *(part for name, value in flags.items() if value is not None for part in _parts(name, value))]


def _parts(name: str, value: object) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    return [option, *map(str, value if isinstance(value, list) else [value])]


FIXED = {
    "GOMP_SPINCOUNT": "20000",  # which fuligo would set: what it starts has the environment of the warm imports
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    ),  # packages of a machine without installation
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, **FIXED, **extra}


def fuligo(*arguments: object, fresh: bool = False, **extra_environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; if `fresh`, or where the environment changes imports, in a process that has imported nothing yet."""
    given, variables = [*map(str, arguments)], environment(**extra_environment)
    if not fresh and not HAS_CUDA and warm_start().suits(variables):
        return warm_start().run(given, variables, DEADLINE_S)
    command = [sys.executable, "-m", "fuligo", *given]
    with interrupt():
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=variables, check=False)


def in_own_process(*arguments: object) -> list[str]:
    """Return the command in a fresh process, with a hash seed of its own, whose engine and ranks fork from it."""
    return [sys.executable, "-m", "tests.e2e.warm_command", ROOM, *map(str, arguments)]


@functools.cache
def warm_start() -> WarmStart:
    return WarmStart(environment())


def succeed(*arguments: object, fresh: bool = False, **extra_environment: str) -> str:
    """Run the command and return its standard output; fail with all of its output unless it exits with 0."""
    done = fuligo(*arguments, fresh=fresh, **extra_environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def fail(exit_code: int, *arguments: object, **extra_environment: str) -> str:
    """Run the command and return its standard error on one line; it must exit with the code and without a traceback."""
    done = fuligo(*arguments, **extra_environment)
    assert done.returncode == exit_code, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())
