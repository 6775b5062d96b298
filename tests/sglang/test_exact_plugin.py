"""The plugin of --exact-on-policy: SGLang finds it, its replacements exist in the pinned version, and its kernels compute the right values.

That engine and trainer have the same bits is proved on GPUs (tests/gpu/test_exact_sglang_cuda.py).
"""

import subprocess
from pathlib import Path

import pytest

from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import EXACT_PLUGIN
from tests.sglang.engines import finished_program, run_program, server_settings


@pytest.fixture(scope="module")
def loaded() -> subprocess.CompletedProcess[str]:
    """Return the output of a process that loads the plugin, also where SGLang lacks an operation, and computes with it."""
    return finished_program("interpreted_ranks", EXACT_PLUGIN)


def test_sglang_loads_it_and_has_what_it_replaces(loaded: subprocess.CompletedProcess[str]) -> None:
    _, *modules = loaded.stdout.split()
    assert set(modules) == {"fuligo_exact"}, loaded.stderr


def test_an_engine_ends_where_it_cannot_replace_an_operation(loaded: subprocess.CompletedProcess[str]) -> None:
    """SGLang itself would log the error and sample with its own kernels."""
    exit_code, *_ = loaded.stdout.split()
    assert int(exit_code) != 0
    assert "fuligo cannot replace SGLang's operations for --exact-on-policy" in loaded.stderr


def test_kernels_compute_the_right_values() -> None:
    run_program("interpreted_kernels")


def test_kernels_compile_for_hopper() -> None:
    run_program("compiled_kernels")


def test_two_ranks_add_up_to_the_trainers_bits(loaded: subprocess.CompletedProcess[str]) -> None:
    assert loaded.returncode == 0, loaded.stderr


def test_only_exact_engines_get_it(tmp_path: Path) -> None:
    with PortClaims() as claims:
        exact, usual = (server_settings("engine 0", tmp_path, claims, tmp_path / "log", is_exact=each) for each in (True, False))
    for name in (repr(str(EXACT_PLUGIN)), "triton"):
        assert name in " ".join(exact.command()) and name not in " ".join(usual.command())
