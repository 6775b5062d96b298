"""Megatron-Core on a CPU: where it says CUDA, it means the device of this process.

Nowhere else does fuligo replace parts of other packages. Each patch is one that Megatron-Core 0.16.1 was seen to need.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device

CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange")


@functools.cache
def run_on_cpu() -> None:
    """Make Megatron-Core compute on the CPU and talk over gloo, for the rest of this process. A further call does nothing."""
    _the_device_is_the_cpu()
    _its_random_numbers_are_the_cpus()
    _streams_have_nothing_to_wait_for()
    _dtypes_are_called_cudas()
    _collectives_do_what_gloo_can()
    _there_is_no_transformer_engine()


def _the_device_is_the_cpu() -> None:
    """`torch.cuda.current_device()`, `device="cuda"` and `.cuda()` are all over Megatron."""
    # `with torch.device(...)` knows factories by a set that it makes once: of the originals, if it is asked for it now.
    _device._device_constructors()
    torch.cuda.current_device = lambda: CPU  # pyright: ignore[reportAttributeAccessIssue]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    Tensor.cuda = lambda self, *_, **__: self


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the CPU for a CUDA device among its arguments, and without page-locked memory, which is CUDA's."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return on_cpu


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _its_random_numbers_are_the_cpus() -> None:
    """The generators that Megatron keeps for tensor and expert parallelism are states of CUDA's generator."""
    from megatron.core.tensor_parallel import random

    def get(*_: object, **__: object) -> Tensor:
        return torch.get_rng_state()

    def put(state: Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = get
    torch.cuda.manual_seed = torch.manual_seed  # pyright: ignore[reportAttributeAccessIssue]
    random._get_cuda_rng_state, random._set_cuda_rng_state = get, put
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns when the CPU's state changes, which is now meant


class _Stream:
    """A stream, and an event of it, on a machine where work is done when a call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        """The all-to-all dispatcher of experts waits for the event, as it would for the stream."""
        return self


def _streams_have_nothing_to_wait_for() -> None:
    @contextlib.contextmanager
    def stream(_: object) -> Iterator[None]:
        yield

    the_stream = _Stream()
    replaced: dict[str, Any] = {
        "Stream": _Stream,
        "stream": stream,
        "current_stream": lambda *_, **__: the_stream,
        "synchronize": lambda *_, **__: None,
    }
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)


def _dtypes_are_called_cudas() -> None:
    """Optimizers sort parameters by the name of their type, such as torch.cuda.FloatTensor."""
    original = Tensor.type

    def called_cudas(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and "cuda" not in answer else answer

    Tensor.type = called_cudas


def _collectives_do_what_gloo_can() -> None:
    """Gloo takes the sizes of an uneven all-to-all as lists, and no averages; Megatron gives sizes as arrays, too."""
    all_to_all = dist.all_to_all_single

    @functools.wraps(all_to_all)
    def with_lists(
        output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        sizes = [None if given is None else [int(size) for size in given] for given in (output_split_sizes, input_split_sizes)]
        return all_to_all(output, input, sizes[0], sizes[1], *args, **kwargs)

    dist.all_to_all_single = with_lists


def _there_is_no_transformer_engine() -> None:
    """Some modules ask for classes of the Transformer Engine by names that they do not define without it."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.TELinear = type("NoTELinear", (), {})  # pyright: ignore[reportAttributeAccessIssue]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
