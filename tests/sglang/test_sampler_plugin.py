"""The plugin that draws tokens in one pass: SGLang finds it and has the sampler that it expects; its kernels draw from the softmax."""

import os
import subprocess
from pathlib import Path

import pytest

from fuligo.engines.sglang.server import SAMPLER_PLUGIN
from tests.sglang.engines import STUBS, sglang_python

HERE = Path(__file__).parent


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{SAMPLER_PLUGIN}{os.pathsep}{STUBS}"
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", **variables}
    command = [str(sglang_python()), str(HERE / program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.parametrize(("switch", "is_replaced"), [({}, "True"), pytest.param({"FULIGO_SAMPLER": "0"}, "False", marks=pytest.mark.slow)])
def test_sglangs_sampler_is_replaced_unless_switched_off(switch: dict[str, str], is_replaced: str) -> None:
    done = run("sampler_hook.py", **switch)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [is_replaced]), done.stderr


def test_draws_are_from_the_softmax_with_its_log_probabilities() -> None:
    done = run("interpreted_draws.py")
    assert done.returncode == 0, done.stderr
