"""Parallel compilation of SGLang 0.5.15's CUDA kernels while its processes import it.

SGLang compiles a kernel with nvcc when a forward pass first calls it: one after the other, about 7 s each; a Llama needs four. The process
that `start` starts compiles the kernels of the model's forward passes in parallel, into SGLang's cache. The engine finds them there, and
waits for a kernel that is not finished (tvm-ffi locks its directory). It compiles all other kernels itself.

The module itself imports only the standard library.
"""

import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

VARIABLE = "FULIGO_KERNELS"
"""Environment variable with the arguments of `kernels` as JSON, `model_path` instead of `config`; unset or empty: compile nothing."""
PROGRAM = """
import sys
sys.path.insert(0, {directory!r})
import fuligo_kernels
del sys.path[0]
fuligo_kernels.compile_all({request!r}, {parent_pid})
"""
NOT_NEOX = {"glm", "glm4"}
"""Model types whose rotary embedding rotates neighboring elements instead of halves."""
NORM_OF_HEADS = {"qwen3", "qwen3_moe", "glm4_moe"}
"""Model types that normalize queries and keys of each head."""
PR_SET_PDEATHSIG = 1

Kernel = tuple[str, str, tuple[Any, ...]]
"""Module in `sglang.jit_kernel`, its function that compiles the kernel, and the function's arguments, dtypes by name."""


def start() -> None:
    """Start the process that compiles the kernels of `$FULIGO_KERNELS`; return at once."""
    if not (request := os.environ.pop(VARIABLE, "")):
        return
    program = PROGRAM.format(directory=str(Path(__file__).parent), request=request, parent_pid=os.getpid())
    # The process must not create a context on the GPUs, which the trainer may be using.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL, env=environment)
    except OSError as error:
        print(f"fuligo: cannot precompile kernels: {error}; the engine will compile them itself", flush=True)


def kernels(config: Mapping[str, Any], tp_size: int, dtype: str, kv_cache_dtype: str) -> list[Kernel]:
    """Return the kernels that a model's forward passes call, except those of multi-head latent attention.

    `config`: the model's config.json; `tp_size`: number of ranks that split the attention heads; `dtype` and `kv_cache_dtype`: SGLang's
    arguments.
    """
    config = config.get("text_config") or config
    found: list[Kernel] = [("clamp_position", "_jit_clamp_position_module", ("int64",))]
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or ""
    if dtype not in ("bfloat16", "float16"):
        return found
    found.append(("activation", "_jit_activation_module", (dtype,)))
    if "kv_lora_rank" in config:
        return found
    kind, num_heads = config["model_type"].removesuffix("_text"), config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // num_heads
    rotary = (config.get("rope_parameters") or {}).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    kv_heads = max(1, (config.get("num_key_value_heads") or num_heads) // tp_size)
    row_bytes = kv_heads * head * (1 if kv_cache_dtype.startswith("fp8") else 2)
    found += [
        ("rope", "_jit_fused_rope_module", (kind not in NOT_NEOX, int(head * rotary), dtype)),
        ("kvcache", "_jit_kvcache_module", (row_bytes,)),
    ]
    if kind in NORM_OF_HEADS and config.get("use_qk_norm", True):
        found.append(("norm", "_jit_qknorm_module", (head, dtype)))
    return found


def compile_all(request: str, parent_pid: int) -> None:
    """Compile the kernels that are not in the cache, and print which cannot be compiled; end with the engine's main process."""
    _end_with_parent()
    if os.getppid() != parent_pid:  # the parent ended before the call
        return
    os.nice(10)  # the imports of the engine come first
    try:
        wanted = json.loads(request)
        config = json.loads((Path(wanted.pop("model_path")) / "config.json").read_text())
        found, capability = kernels(config, **wanted), _compute_capability()
        cache = Path(os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser()
        # The default is private, since an engine runs what is in it; a directory that the user chose may be meant for several users.
        cache.mkdir(0o777 if "TVM_FFI_CACHE_DIR" in os.environ else 0o700, parents=True, exist_ok=True)
        names = json.dumps([version("sglang"), version("apache-tvm-ffi"), capability, found])
        stamp = cache / f"fuligo_{hashlib.sha256(names.encode()).hexdigest()[:16]}"
        with stamp.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another engine of this machine compiles them
            file.seek(0)
            if not file.read():
                problems = list(_compiled(found, capability))
                for problem in problems:
                    print(f"fuligo: {problem}", flush=True)
                if not problems:  # otherwise the next engine tries again
                    file.write("compiled\n")
    except BlockingIOError:
        pass
    except Exception as error:
        print(f"fuligo: cannot precompile kernels: {type(error).__name__}: {error}; the engine will compile them itself", flush=True)


def _compiled(found: list[Kernel], capability: tuple[int, int]) -> Iterator[str]:
    """Compile kernels in parallel; yield a message for each that cannot be compiled."""
    import torch
    from sglang.jit_kernel import utils

    # `load_jit` sets this variable and then restores its old value; without an old value, it would remove it while other threads need it.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = "{}.{}".format(*capability)

    def compiled(kernel: Kernel) -> str | None:
        module, function, arguments = kernel
        values = [getattr(torch, value) if isinstance(value, str) else value for value in arguments]
        try:
            getattr(importlib.import_module(f"sglang.jit_kernel.{module}"), function)(*values)
        except Exception as error:
            return f"cannot precompile the kernel {module}: {type(error).__name__}: {str(error)[-500:]}; the engine will compile it itself"
        return None

    with utils.override_jit_cuda_arch(*capability), ThreadPoolExecutor(len(found)) as threads:
        yield from filter(None, threads.map(compiled, found))


def _end_with_parent() -> None:
    """Have Linux kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _compute_capability() -> tuple[int, int]:
    """Return the compute capability of the machine's first GPU, without a context on it. Raises OSError if NVML fails."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    for status in (
        library.nvmlInit_v2(),
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)),
        library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)),
    ):
        if status:
            raise OSError(f"cannot read the compute capability: NVML returned status {status}")
    return major.value, minor.value
