"""Packed attention as an attention implementation of transformers, so that any of its models runs on packed tokens."""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import AttentionInterface

from fuligo.errors import TrainerError
from fuligo.models.attention import packed_attention

PACKED_ATTENTION = "fuligo_packed"
"""Name by which models select it: `attn_implementation=PACKED_ATTENTION`."""


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
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention for one layer; transformers calls it.

    Args:
        query: [1, H, T, D]
        key: [1, Hkv, T, D]
        value: [1, Hkv, T, Dv]
        packed_cu_seqlens: starts of the sequences; the argument of that name given to the model's forward.

    Returns:
        [1, T, H, Dv] and no attention weights.

    Raises:
        TrainerError: the model's attention has a feature that packed attention lacks.
    """
    name = type(module).__name__
    for feature, given in (("logit soft-capping", softcap), ("attention sinks", s_aux)):
        if given is not None:
            raise TrainerError(f"{name} uses {feature}, which the torch trainer's packed attention does not support. Choose another model.")
    if packed_cu_seqlens is None:
        raise TrainerError(f"{name} does not receive the arguments of its model's forward; packed sequences would see each other.")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    return packed_attention(q, k, v, packed_cu_seqlens, scale=scale, window=sliding_window).unsqueeze(0), None
