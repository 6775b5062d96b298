"""Patches that let Megatron-Core run on a CPU by replacing its uses of CUDA. Megatron-Core 0.16.1 needs each of them."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device

CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange")


@functools.cache
def run_on_cpu() -> None:
    """Make Megatron-Core compute on the CPU and communicate over gloo for the rest of this process. Further calls do nothing."""
    _replace_devices()
    _replace_generators()
    _replace_streams()
    _rename_dtypes()
    _adapt_collectives()
    _define_transformer_engine_names()


def _replace_devices() -> None:
    """Replace `torch.cuda.current_device()`, `device="cuda"` and `.cuda()`, which Megatron uses throughout."""
    # `with torch.device(...)` caches the set of factory functions at its first use: fill the cache while they are the originals.
    _device._device_constructors()
    torch.cuda.current_device = lambda: CPU  # pyrefly: ignore[bad-assignment]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    Tensor.cuda = lambda self, *_, **__: self


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that a CUDA device argument becomes the CPU and memory is not pinned."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return on_cpu


def _replace_generators() -> None:
    """Replace the CUDA generator, whose states Megatron tracks for tensor and expert parallelism, with the CPU generator."""
    from megatron.core.tensor_parallel import random

    def get(*_: object, **__: object) -> Tensor:
        return torch.get_rng_state()

    def put(new_state: Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = get
    torch.cuda.manual_seed = torch.manual_seed  # pyrefly: ignore[bad-assignment]
    random._get_cuda_rng_state, random._set_cuda_rng_state = get, put
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # silences the warning about a changed CPU state, which is intended here


class _Stream:
    """Stand-in for a CUDA stream and its event on a CPU, where work is complete when a call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> Self:
        """Return an event, which the all-to-all dispatcher of experts waits for; the stream itself serves as one."""
        return self


def _replace_streams() -> None:
    the_stream = _Stream()
    replaced: dict[str, Any] = {
        "Stream": _Stream,
        "stream": contextlib.nullcontext,
        "current_stream": lambda *_, **__: the_stream,
        "synchronize": lambda *_, **__: None,
    }
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)


def _rename_dtypes() -> None:
    """Rename tensor types, because Megatron's optimizers group parameters by names such as torch.cuda.FloatTensor."""
    original = Tensor.type

    def called_cudas(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and "cuda" not in answer else answer

    Tensor.type = called_cudas


def _adapt_collectives() -> None:
    """Adapt the all-to-all collective to gloo, which accepts split sizes only as lists."""
    all_to_all = dist.all_to_all_single

    @functools.wraps(all_to_all)
    def with_lists(
        output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        sizes = [None if given is None else [int(size) for size in given] for given in (output_split_sizes, input_split_sizes)]
        return all_to_all(output, input, sizes[0], sizes[1], *args, **kwargs)

    dist.all_to_all_single = with_lists


def _define_transformer_engine_names() -> None:
    """Define the names of TransformerEngine classes that some Megatron modules use but do not define without TransformerEngine."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.TELinear = type("NoTELinear", (), {})
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
