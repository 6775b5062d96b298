"""Changes of SGLang 0.5.15 on request: forked processes instead of spawned ones, plain memory instead of pinned memory, names of kernels,
and Triton's interpreter with numpy 2.4. With forked processes, only engines import torch for these changes, not the router.

Forked engines compile no kernels: the few for images take 12 s. Their schedulers also sleep while they are paused, as they do while they
are idle: SGLang's spin, on the cores that the trainer needs. The process that they are forked from has the names of kernels for CPUs with
AMX: the model of Qwen3.5, which the processor of Qwen's images imports, looks them up, and nothing here computes with them.

SGLang pins its record of experts and adapters, also without a GPU.
"""

import os


def use_plain_memory():
    """Have torch pin no memory, which needs a GPU."""
    import torch

    def _plain(make):
        def made(*arguments, pin_memory=False, **options):
            return make(*arguments, **options)

        return made

    for _name in ("zeros", "tensor", "arange", "empty"):
        setattr(torch, _name, _plain(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def name_kernels():
    """Define the names of the kernels for CPUs with AMX, without the kernels."""
    from torch import library, ops

    for name in ("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"):
        if not hasattr(ops.sgl_kernel, name):
            library.define(f"sgl_kernel::{name}", "() -> ()")


def interpret_kernels():
    """Have Triton interpret the kernels that are defined from here on, and the functions that it defined when it was imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import language
    from triton.runtime import interpreter, jit

    for module in (language, language.random, language.standard):
        for name, value in vars(module).items():
            if isinstance(value, jit.JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(value.fn))
    patch_tensor, patch_language, launch = interpreter._patch_lang_tensor, interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_indices(tensor, scope):
        """Let numpy 2.4 convert the interpreter's scalars, arrays of one element, to indices."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def launch_anew(self, *arguments, **options):
        patched.clear()
        return launch(self, *arguments, **options)

    def patch_once(function):
        """Patch what a function sees of Triton's language once per launch instead of at every call, which takes longer."""
        names = id(function.__globals__)
        if names in patched:
            return interpreter._LangPatchScope()
        patched.add(names)
        return patch_language(function)

    interpreter._patch_lang_tensor, interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_indices, patch_once, launch_anew


if os.environ.get("TRITON_INTERPRET"):
    interpret_kernels()

if os.environ.get("FULIGO_TEST_FORKED_ENGINE"):
    import gc
    import multiprocessing
    import sys

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch reads it when it is imported
    gc.set_threshold(100_000, 50, 1000)  # collections take a sixth of the time of SGLang's imports

    _set_start_method = multiprocessing.set_start_method

    def _fork(_, force=False):
        """Stand in for `set_start_method`, which SGLang calls before it starts its processes."""
        name_kernels()
        if os.environ.get("FULIGO_TEST_PLAIN_MEMORY"):
            use_plain_memory()
        _set_start_method("fork", force)
        scheduler = sys.modules["sglang.srt.managers.scheduler"].Scheduler
        process_input_requests = scheduler.process_input_requests

        def process_and_sleep(self, requests):
            process_input_requests(self, requests)
            if self._engine_paused:
                self.maybe_sleep_on_idle()  # until the next request

        scheduler.process_input_requests = process_and_sleep

    multiprocessing.set_start_method = _fork
elif os.environ.get("FULIGO_TEST_PLAIN_MEMORY"):
    use_plain_memory()
