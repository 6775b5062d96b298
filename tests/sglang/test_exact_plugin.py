"""The plugin of --exact-on-policy: SGLang finds it, its replacements exist in the pinned version, and its kernels compute the right values.

That engine and trainer have the same bits is proved on GPUs (tests/gpu/test_exact_sglang_cuda.py).
"""

import os
import subprocess
from pathlib import Path

from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import EXACT_PLUGIN
from tests.sglang.engines import STUBS, server_settings, sglang_python

LOAD = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe import topk
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.sampler import Sampler
from sglang.srt.models import qwen3_moe, utils
for each in (UnquantizedLinearMethod.apply, RMSNorm.forward_cuda, RotaryEmbedding.forward_cuda, SiluAndMul.forward_cuda,
             UnquantizedFusedMoEMethod.forward_cuda, topk.fused_topk, qwen3_moe.enable_fused_set_kv_buffer,
             utils.can_use_fused_inplace_qknorm, TritonAttnBackend.__init__,
             LogitsProcessor._compute_lm_head, Sampler.forward, Sampler._attach_logprobs_to_output):
    print(each.__module__)
"""
"""Prints the module of each operation that the plugin replaces."""


def run(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    python = sglang_python()
    assert python is not None
    variables = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{STUBS}", "SGLANG_USE_CPU_ENGINE": "1"}
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=300, env=variables, check=False)


def test_sglang_loads_it_and_has_what_it_replaces() -> None:
    done = run("-c", LOAD, path=EXACT_PLUGIN)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"fuligo_exact"}


def test_an_engine_ends_where_it_cannot_replace_an_operation() -> None:
    """SGLang itself would log the error and sample with its own kernels."""
    broken = "import sglang.srt.layers.sampler as s; del s.Sampler._attach_logprobs_to_output\n" + LOAD
    done = run("-c", broken, path=EXACT_PLUGIN)
    assert done.returncode != 0
    assert "fuligo cannot replace SGLang's operations for --exact-on-policy" in done.stderr


def test_kernels_compute_the_right_values() -> None:
    done = run(str(Path(__file__).parent / "interpreted_kernels.py"), path=STUBS)
    assert done.returncode == 0, done.stderr


def test_kernels_compile_for_hopper() -> None:
    done = run(str(Path(__file__).parent / "compiled_kernels.py"), path=STUBS)
    assert done.returncode == 0, done.stderr


def test_two_ranks_add_up_to_the_trainers_bits() -> None:
    done = run(str(Path(__file__).parent / "interpreted_ranks.py"), path=EXACT_PLUGIN)
    assert done.returncode == 0, done.stderr


def test_only_exact_engines_get_it(tmp_path: Path) -> None:
    with PortClaims() as claims:
        exact, usual = (server_settings("engine 0", tmp_path, claims, tmp_path / "log", is_exact=each) for each in (True, False))
    for name in (repr(str(EXACT_PLUGIN)), "triton"):
        assert name in " ".join(exact.command()) and name not in " ".join(usual.command())
