"""Attention over packed tokens as an attention implementation of transformers, which its models select by name."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from fuligo.errors import TrainerError
from fuligo.models.attention import VarlenRow, packed_attention, varlen_attention
from fuligo.models.batch_invariant import causal_attention
from fuligo.models.token_tree import TokenTree
from fuligo.models.tree_attention import TreeRow, invariant_tree_attention, tree_attention, varlen_tree_attention

PACKED_ATTENTION = "fuligo_packed"
"""Name of the attention implementation: `attn_implementation=PACKED_ATTENTION`."""


def register() -> None:
    """Register `PACKED_ATTENTION` with transformers, which builds no mask for an implementation without a mask function."""
    AttentionInterface.register(PACKED_ATTENTION, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_cu_seqlens: Sequence[int] | None = None,
    packed_row: VarlenRow | None = None,
    packed_tree: TokenTree | TreeRow | None = None,
    packed_invariantly: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer. Called by transformers; the `packed_*` arguments are passed to the model's forward.

    Args:
        query: [1, H, T, D]
        key: [1, Hkv, T, D]
        value: [1, Hkv, T, Dv]
        s_aux: [H] attention sinks.
        packed_cu_seqlens: starts of the sequences, and T.
        packed_row: the same starts on the device, for compiled layers.
        packed_tree: tree of the T tokens if sequences share prefixes; for compiled layers, its indices on the device.
        packed_invariantly: compute with `models.batch_invariant`.

    Returns:
        [1, T, H, Dv] and no attention weights.

    Raises:
        TrainerError: the model's attention has a feature that packed attention lacks.
    """
    name = type(module).__name__
    if softcap is not None:
        raise TrainerError(
            f"cannot train {name}: packed attention in the torch trainer does not support logit soft-capping; choose another model"
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    given: Any = {"scale": query.size(-1) ** -0.5 if scaling is None else scaling, "window": sliding_window, "sinks": s_aux}
    if packed_invariantly:
        assert sliding_window is None and s_aux is None, "such models are refused when they are loaded"
        if isinstance(packed_tree, TokenTree):
            return invariant_tree_attention(q, k, v, packed_tree, scale=given["scale"]).unsqueeze(0), None
    if isinstance(packed_tree, TreeRow):
        return varlen_tree_attention(q, k, v, packed_tree, **given).unsqueeze(0), None
    if packed_tree is not None:
        return tree_attention(q, k, v, packed_tree, **given).unsqueeze(0), None
    if packed_row is not None:
        return varlen_attention(q, k, v, packed_row, **given).unsqueeze(0), None
    if packed_cu_seqlens is None:
        raise TrainerError(
            f"cannot run {name} on packed tokens: the model's forward does not pass its keyword arguments on to attention, so sequences "
            "would attend to each other; choose another model"
        )
    if packed_invariantly:
        return causal_attention(q, k, v, packed_cu_seqlens, scale=given["scale"]).unsqueeze(0), None
    return packed_attention(q, k, v, packed_cu_seqlens, **given).unsqueeze(0), None
