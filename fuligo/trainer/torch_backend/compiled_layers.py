"""Decoder layers compiled with torch.compile, once for rows of all lengths."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from fuligo.models.attention import VarlenRow
from fuligo.models.gated_delta import gated_delta_modules
from fuligo.models.transformers_types import has_tower
from fuligo.models.tree_attention import TreeRow

RowT = TypeVar("RowT", VarlenRow, TreeRow)

COMPILED_KINDS = 32
"""Limit of compiled variants of a layer in a run: kinds of layers of up to four models, each with and without gradient."""


def can_compile(model: PreTrainedModel) -> bool:
    """Return whether the model's layers can be compiled.

    Compilation supports neither experts (their number of tokens depends on the data), latent attention (heads differ in size), Gated
    DeltaNet (runs per sequence), vision towers (run per image), nor layers that share keys and values (passed on in a dictionary).
    """
    if has_tower(model.config) or getattr(model.config, "num_kv_shared_layers", 0):
        return False
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    return not has_experts and not gated_delta_modules(model) and getattr(model.config, "kv_lora_rank", None) is None


def allow_compiled_kinds(num_runs: int) -> None:
    """Raise torch's limit of compiled variants of a layer to `COMPILED_KINDS` for each run in this process: runs have different adapters.

    Beyond the limit, torch would run a layer without compilation and only log a warning.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = COMPILED_KINDS * num_runs
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of every layer at its first call; layers of the same kind share the compiled code."""
    from torch._inductor import config as inductor  # not at import time: it takes over a second, also where nothing is compiled

    if torch._dynamo.config.recompile_limit < COMPILED_KINDS:
        allow_compiled_kinds(num_runs=1)
    # By default the compiler fuses the two reductions in a norm's backward pass only if rows have at least 4,096 tokens, twice the hidden
    # size and 5 Mi elements, and compiles a layer again for a row on the other side of one of these limits.
    inductor.triton.mix_order_reduction_non_strict_mode = True
    for layer in layers:
        layer.forward = _compiled(layer.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's forward for any number of tokens.

    Only the number of tokens is marked as dynamic. With `dynamic=True`, the head size, the norms' epsilon and an adapter's scaling would be
    symbolic too, and the compiler would take minutes to simplify the resulting expressions.
    """
    compiled = torch.compile(forward)

    def call(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # The embeddings are frozen; without this, the first layer would be compiled separately.
            hidden = hidden.detach().requires_grad_()
        rotations = kwargs.get("position_embeddings") or ()
        for tensor in (hidden, *rotations, kwargs.get("position_ids")):
            if isinstance(tensor, Tensor):
                _vary_tokens(tensor, num_tokens=hidden.size(1))
        return compiled(hidden, *args, **kwargs)

    return call


def varying(row: RowT) -> RowT:
    """Mark the lengths of the row's tensors as dynamic for the compiler, and return the row."""
    for tensor in row:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return row


def _vary_tokens(tensor: Tensor, *, num_tokens: int) -> None:
    """Mark dimensions of size `num_tokens` as dynamic for the compiler, also in the tensor that this one is a view of."""
    for each in (tensor, tensor._base):
        for dim, size in enumerate(() if each is None else each.shape):
            if size == num_tokens:
                torch._dynamo.maybe_mark_dynamic(each, dim)
