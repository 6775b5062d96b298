"""Gated delta rule (arXiv 2412.06464) over packed sequences: neither state nor convolution passes from one sequence to the next.

transformers' modules keep their two operations as attributes and pass them `seq_idx` and `cu_seq_lens_q` from the model's forward. The
kernels of causal-conv1d and flash-linear-attention, which transformers uses if they are installed, honor both arguments. transformers'
plain torch functions ignore them; this module replaces those functions.
"""

import logging
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuligo.models.attention import equal_length_runs

logger = logging.getLogger(__name__)

DECAY_RATES = ".linear_attn.A_log"
"""Suffix of the names of the parameters with the logarithms of the heads' decay rates."""

T = TypeVar("T")
Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' `chunk_gated_delta_rule`: queries, keys, values [B, L, H, D], `g` and `beta` [B, L, H] -> values, final state."""


def gated_delta_modules(model: nn.Module) -> list[Any]:
    """Return the layers of gated delta-rule attention."""
    return [module for module in model.modules() if hasattr(module, "chunk_gated_delta_rule")]


def is_kernel(operation: Callable[..., Any]) -> bool:
    """Return whether a function or class comes from a package of GPU kernels, not from transformers' plain torch code."""
    return not operation.__module__.startswith("transformers.")


def pack_gated_delta(model: nn.Module) -> int:
    """Make the gated delta-rule layers accept packed sequences on any device, and return the number of these layers."""
    modules = gated_delta_modules(model)
    lacks_kernels = _lacks_kernels(modules[0]) if modules and torch.cuda.is_available() else None
    for module in modules:
        rule, convolution = module.chunk_gated_delta_rule, module.causal_conv1d_fn
        plain = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule
        packed = partial(packed_rule, plain)
        module.chunk_gated_delta_rule = packed if lacks_kernels or not is_kernel(rule) else partial(_in_half_precision, rule, packed)
        module.causal_conv1d_fn = packed_convolution if convolution is None else partial(_on_device, convolution, packed_convolution)
        module.norm = _plain_norm(module)
    if lacks_kernels:
        logger.warning(f"linear attention runs in plain torch, which is slow on a GPU: {lacks_kernels}")
    return len(modules)


def _on_device(kernel: Callable[..., T], plain: Callable[..., T], *inputs: Tensor, **options: Any) -> T:
    """Apply `kernel` to CUDA tensors and `plain` to others, since models are checked on the CPU before they move to a GPU."""
    is_cuda = any(tensor.is_cuda for tensor in (*inputs, *options.values()) if isinstance(tensor, Tensor))
    return (kernel if is_cuda else plain)(*inputs, **options)


def _in_half_precision(kernel: Callable[..., T], plain: Callable[..., T], query: Tensor, *inputs: Tensor, **options: Any) -> T:
    """Apply `kernel` to CUDA tensors in half precision and `plain` to others, since flash-linear-attention's rule refuses float32."""
    return (kernel if query.is_cuda and query.dtype != torch.float32 else plain)(query, *inputs, **options)


def _plain_norm(module: Any) -> nn.Module:
    """Return a layer's gated norm as transformers' own module: flash-linear-attention's runs only on GPUs."""
    if is_kernel(type(module.norm)):
        source = sys.modules[type(module).__module__]
        own: Any = next(each for name, each in vars(source).items() if name.endswith("RMSNormGated") and each and not is_kernel(each))
        norm = own(module.head_v_dim, eps=module.layer_norm_epsilon)
        norm.weight = nn.Parameter(module.norm.weight.detach().to(module.out_proj.weight))
        return norm
    return module.norm


def _lacks_kernels(module: Any) -> str | None:
    """Return why a layer cannot use flash-linear-attention on this machine's GPUs, and the fix; None if it can."""
    if not is_kernel(module.chunk_gated_delta_rule):
        return "transformers does not find flash-linear-attention; pip install flash-linear-attention causal-conv1d"
    import triton

    number = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    # These versions of Triton compute wrong gradients (fla-org/flash-linear-attention#640): the backward pass raises or uses tilelang.
    if torch.cuda.get_device_capability()[0] == 9 and (3, 4, 0) <= number < (3, 7, 1) and find_spec("tilelang") is None:
        return f"gradients of flash-linear-attention are wrong with Triton {triton.__version__} on Hopper GPUs; pip install tilelang"
    return None


def sequence_arguments(cu_seqlens: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of a model's forward that tell its gated delta-rule layers where sequences begin."""
    return {"cu_seq_lens_q": _starts(cu_seqlens, device), "seq_idx": sequence_ids(cu_seqlens, device)}


@lru_cache(maxsize=16)
def _starts(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cache also serves passes with gradient
        return torch.tensor(cu_seqlens, device=device)


@lru_cache(maxsize=16)
def sequence_ids(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the [1, T] int32 index of each token's sequence."""
    with torch.inference_mode(False):
        lengths = torch.tensor(cu_seqlens, device=device).diff()
        return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device=device), lengths)[None]


def packed_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, seq_idx: Tensor | None = None) -> Tensor:
    """Convolve each channel causally within each sequence, then apply SiLU.

    Args:
        x: [B, C, T]
        weight: [C, K], the last column for the token itself.
        bias: [C]
        seq_idx: [B, T] index of each token's sequence; None: each row is one sequence.

    Returns:
        [B, C, T]
    """
    assert activation == "silu", activation
    taps, length = weight.size(1), x.size(2)
    if seq_idx is None:
        return F.silu(F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=x.size(1))[..., :length])
    padded, ids = F.pad(x, (taps - 1, 0)), F.pad(seq_idx, (taps - 1, 0), value=-1)
    out = x * weight[:, -1:]
    for tap in range(taps - 1):
        is_same = ids[:, None, tap : tap + length] == seq_idx[:, None]
        out = out + (padded[..., tap : tap + length] * weight[:, tap, None]).where(is_same, 0)
    return F.silu(out if bias is None else out + bias[:, None])


def packed_rule(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply `rule` to each sequence; neighbors of equal length share a call.

    Args:
        query, key: [1, T, H, Dk]
        value: [1, T, H, Dv]
        g, beta: [1, T, H]
        cu_seqlens: [S + 1] starts of the sequences; None: `rule` gets all arguments as they are.

    Returns:
        [1, T, H, Dv], and the final states [S, H, Dk, Dv] if `output_final_state`.
    """
    if cu_seqlens is None:
        return rule(query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state, **options)
    assert initial_state is None, "packed sequences start without a state"
    return rule_by_runs(rule, (query, key, value, g, beta), cu_seqlens.tolist(), output_final_state=output_final_state, **options)


def rule_by_runs(
    rule: Rule, inputs: Sequence[Tensor], cu_seqlens: Sequence[int], *, output_final_state: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Apply `rule` to each sequence, like `packed_rule`; `inputs` are its queries, keys, values, `g` and `beta`."""
    runs = equal_length_runs(tuple(cu_seqlens))
    chunks = zip(*(x[0].split([count * length for count, length in runs]) for x in inputs))
    values: list[Tensor] = []
    states: list[Tensor] = []
    for run, chunk in zip(runs, chunks):
        q, k, v, g, beta = (x.unflatten(0, run) for x in chunk)
        value, state = rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=output_final_state, **options)
        values.append(value.flatten(0, 1))
        states += [] if state is None else [state]
    return torch.cat(values)[None], torch.cat(states) if states else None
