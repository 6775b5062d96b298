"""Tests of the kernels that are compiled while SGLang is imported; tests/sglang/test_kernels.py compares their names with SGLang's."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from fuligo.engines.sglang.ahead import fuligo_kernels

GLM4 = {
    "model_type": "glm4",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "dtype": "bfloat16",
}
CLAMP = ("clamp_position", "_jit_clamp_position_module", ("int64",))


def test_glm4_rotates_half_of_each_head_in_neighboring_pairs() -> None:
    kernels = fuligo_kernels.kernels(GLM4 | {"partial_rotary_factor": 0.5}, 4, "auto", "auto")
    assert ("rope", "_jit_fused_rope_module", (False, 64, "bfloat16")) in kernels
    assert ("kvcache", "_jit_kvcache_module", (256,)) in kernels  # one key-value head per rank


def test_an_fp8_cache_has_one_byte_per_element() -> None:
    assert ("kvcache", "_jit_kvcache_module", (256,)) in fuligo_kernels.kernels(GLM4, 1, "bfloat16", "fp8_e4m3")


def test_the_language_models_part_of_a_config_counts() -> None:
    config = {"model_type": "vision", "hidden_size": 1}
    assert fuligo_kernels.kernels(config | {"text_config": GLM4}, 1, "auto", "auto") == fuligo_kernels.kernels(GLM4, 1, "auto", "auto")
    assert fuligo_kernels.kernels(GLM4 | {"text_config": None}, 1, "auto", "auto") == fuligo_kernels.kernels(GLM4, 1, "auto", "auto")


def test_a_model_in_float32_has_only_the_kernel_without_a_dtype() -> None:
    """SGLang then chooses the dtype by rules of its own."""
    assert fuligo_kernels.kernels(GLM4 | {"dtype": "float32"}, 1, "auto", "auto") == [CLAMP]


def test_attention_kernels_of_mla_are_left_to_the_engine() -> None:
    config = {"model_type": "glm4_moe_lite", "kv_lora_rank": 512, "hidden_size": 2048, "num_attention_heads": 20, "torch_dtype": "bfloat16"}
    assert [module for module, _, _ in fuligo_kernels.kernels(config, 1, "auto", "auto")] == ["clamp_position", "activation"]


class Compiler:
    """Modules of `sglang.jit_kernel` whose kernels are compiled only after all have been started; `fails` names one that fails."""

    fails: str | None = "rope"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
        self.begun = threading.Barrier(len(names), timeout=30)
        self.compiled: list[str] = []
        package, utils = ModuleType("sglang.jit_kernel"), ModuleType("sglang.jit_kernel.utils")
        vars(package)["utils"] = utils
        vars(utils)["override_jit_cuda_arch"] = lambda major, minor: nullcontext()
        monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
        for module in (package, utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name, function, _ in fuligo_kernels.kernels(GLM4, 1, "auto", "auto"):
            module = ModuleType(f"sglang.jit_kernel.{name}")
            setattr(module, function, lambda *arguments, name=name: self.compile(name))
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def compile(self, name: str) -> None:
        self.begun.wait()
        if name == self.fails:
            raise RuntimeError("nvcc: not found")
        self.compiled.append(name)


def request_in_this_process(monkeypatch: pytest.MonkeyPatch, directory: Path) -> str:
    """Return a request for GLM4 that `compile_all` can serve here as on an H200, with the model in `directory`."""
    monkeypatch.setattr(fuligo_kernels, "version", lambda package: "1")
    monkeypatch.setattr(fuligo_kernels, "_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    monkeypatch.setattr(fuligo_kernels, "_end_with_parent", lambda: None)
    (directory / "config.json").write_text(json.dumps(GLM4))
    return json.dumps({"model_path": str(directory), "tp_size": 1, "dtype": "auto", "kv_cache_dtype": "auto"})


def test_kernels_are_compiled_in_parallel_until_none_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["activation", "clamp_position", "kvcache", "rope"]
    compiler = Compiler(monkeypatch, names)
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "")
    request = request_in_this_process(monkeypatch, tmp_path)
    fuligo_kernels.compile_all(request, os.getppid())
    assert sorted(compiler.compiled) == ["activation", "clamp_position", "kvcache"]
    assert capfd.readouterr().out == (
        "fuligo: cannot precompile the kernel rope: RuntimeError: nvcc: not found; the engine will compile it itself\n"
    )
    compiler.fails = None
    for _ in range(2):
        fuligo_kernels.compile_all(request, os.getppid())
    assert sorted(compiler.compiled[3:]) == names, "again, since one failed, but only once"
    fuligo_kernels.compile_all(request.replace('"tp_size": 1', '"tp_size": 2'), os.getppid())  # other kernels
    assert sorted(compiler.compiled[7:]) == names


@pytest.mark.parametrize(("chosen", "mode"), [(None, 0o700), (".cache/tvm-ffi", 0o775)])
def test_only_a_cache_that_the_user_chose_can_belong_to_several_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None, mode: int
) -> None:
    request = request_in_this_process(monkeypatch, tmp_path)
    monkeypatch.setattr(fuligo_kernels, "_compiled", lambda *_: iter(()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TVM_FFI_CACHE_DIR", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / chosen))
    umask = os.umask(0o002)
    try:
        fuligo_kernels.compile_all(request, os.getppid())
    finally:
        os.umask(umask)
    assert (tmp_path / ".cache" / "tvm-ffi").stat().st_mode & 0o777 == mode


def test_a_model_that_cannot_be_read_is_named_and_the_engine_starts(tmp_path: Path) -> None:
    request = json.dumps({"model_path": str(tmp_path / "none"), "tp_size": 1, "dtype": "auto", "kv_cache_dtype": "auto"})
    program = f"import sys; sys.path.append({str(Path(fuligo_kernels.__file__).parent)!r}); import fuligo_kernels; fuligo_kernels.start()"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; import os; assert not os.environ.get({fuligo_kernels.VARIABLE!r}); os.wait()"],
        env={**os.environ, fuligo_kernels.VARIABLE: request},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("fuligo: cannot precompile kernels: FileNotFoundError: ")
