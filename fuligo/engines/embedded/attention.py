"""Softmax attention over the KV pools, which replaces the attention of a Hugging Face model.

The model computes on a flat row of tokens [1, N]. transformers calls `attend` for every layer and passes it the `AttentionPlan` of the
step, which is a keyword argument of the model's forward.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fuligo.engines.embedded.kv_cache import KVPool
from fuligo.errors import EngineError
from fuligo.models.attention import packed_attention
from fuligo.models.batch_invariant import attention, causal_attention
from fuligo.models.sink_attention import attention_with_sinks

ATTENTION_NAME = "fuligo_kv_pools"
UNSUPPORTED = {"softcap": "soft-capped scores", "position_bias": "a position bias", "indices": "keys selected by an indexer"}
"""Arguments of transformers' attention interface that `attend` refuses, with their meaning."""
SGLANG_INSTEAD = "serve it with SGLang (in a run, --rollout-backend sglang)"
"""Advice for a model that the engine cannot serve; `fuligo serve` has no flag for another engine."""


@dataclass(slots=True)
class Segment:
    """Tokens `start` to `end - 1` of a batch, which belong to rows of one pool."""

    pool: KVPool
    start: int
    end: int
    rows: torch.Tensor
    """[end - start] int64, row of each token in its pool."""
    slots: torch.Tensor
    """[(end - start) * blocks] int64, `KVPool.slots` of the tokens."""
    positions: torch.Tensor
    """[end - start] int64 position of each token in its request."""
    longest: int
    """Tokens of the longest row, including this step's."""
    equal: bool
    """True if all rows have the same length."""


@dataclass(slots=True)
class AttentionPlan:
    """Attention inputs of a step, prepared once for all layers."""

    segments: list[Segment]
    cu_seqlens: list[int] | None
    """[S + 1] starts of the sequences in a prefill, then N; None in decode, with one token per row."""
    is_batch_invariant: bool = False
    """True to compute with `models.batch_invariant`; set by the model."""
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """(Hkv, Dk, Dv) of the keys and values of each layer that called `attend`."""
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the additive mask [n, 1, 1, longest] of a decode segment; None if every row sees all `longest` keys."""
        key = (number, window)
        if key not in self._masks:
            segment = self.segments[number]
            if segment.equal and (window is None or segment.longest <= window):
                self._masks[key] = None
            else:
                keys, hidden = self._keys_after(segment)
                if window is not None:
                    hidden |= keys <= segment.positions[:, None] - window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
                self._masks[key] = mask[:, None, None, :]
        return self._masks[key]

    def hidden(self, number: int) -> torch.Tensor | None:
        """Return the mask [n, 1, longest] of a decode segment, True at keys beyond a row's end; None if all rows have equal length."""
        segment = self.segments[number]
        return None if segment.equal else self._keys_after(segment)[1][:, None]

    def _keys_after(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key positions [longest], and a mask [n, longest] that is True at keys after each row's own position."""
        keys = torch.arange(segment.longest, device=segment.positions.device)
        return keys, keys > segment.positions[:, None]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer; transformers calls it with these arguments.

    Args:
        query: [1, H, N, D]
        key, value: [1, Hkv, N, D] and [1, Hkv, N, Dv]
        s_aux: [H] attention sinks

    Returns:
        [1, N, H, Dv] and no attention weights

    Raises:
        EngineError: an argument in `UNSUPPORTED` is given, or `attention_plan` is missing
    """
    for name, meaning in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise EngineError(f"the embedded engine cannot serve {type(module).__name__}: it uses {meaning} ({name}); {SGLANG_INSTEAD}")
    if attention_plan is None:
        raise EngineError(
            f"the embedded engine cannot serve {type(module).__name__}: the model does not pass the keyword arguments of its forward on to "
            f"its attention; {SGLANG_INSTEAD}"
        )
    layer: int = module.layer_idx  # pyrefly: ignore[bad-assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention_plan.seen[layer] = (k.shape[1], k.shape[2], v.shape[2])
    for segment in attention_plan.segments:
        segment.pool.write(layer, segment.slots, k[segment.start : segment.end], v[segment.start : segment.end])
    if attention_plan.is_batch_invariant:
        assert sliding_window is None and s_aux is None, "refused when the model was loaded"
        out = _attend_invariantly(attention_plan, layer, q, k, v, scale)
    elif attention_plan.cu_seqlens is not None:
        out = packed_attention(q, k, v, attention_plan.cu_seqlens, scale=scale, window=sliding_window, sinks=s_aux)
    else:
        outs = [
            decode_segment(segment, layer, q, attention_plan.mask(number, sliding_window, q.dtype), scale, s_aux)
            for number, segment in enumerate(attention_plan.segments)
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out[None], None


def decode_segment(
    segment: Segment, layer: int, query: torch.Tensor, mask: torch.Tensor | None, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend with one query token per row to the row's keys: query [N, H, D] -> [n, H, Dv].

    Query heads that share a key head are the rows of one attention call, so keys are never repeated.
    """
    n = segment.end - segment.start
    k = segment.pool.keys(layer)[:n, :, : segment.longest]
    v = segment.pool.values(layer)[:n, :, : segment.longest]
    q = query[segment.start : segment.end]
    grouped = q.reshape(n, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    if sinks is not None:
        out = attention_with_sinks(grouped, k, v, sinks.view(grouped.shape[1:3]), scale=scale, mask=mask)
        return out.reshape(n, q.shape[1], v.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(n, q.shape[1], v.shape[3])


def _attend_invariantly(
    plan: AttentionPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute batch-invariant attention for queries [N, H, D], of whole sequences (prefill) or one per row (decode)."""
    if plan.cu_seqlens is not None:
        return causal_attention(query, key, value, plan.cu_seqlens, scale=scale)
    outs: list[torch.Tensor] = []
    for number, segment in enumerate(plan.segments):
        n = segment.end - segment.start
        k, v = (cache[:n, :, : segment.longest].transpose(1, 2) for cache in (segment.pool.keys(layer), segment.pool.values(layer)))
        hidden = plan.hidden(number)
        outs.append(attention(query[segment.start : segment.end, None], k, v, hidden=hidden, scale=scale)[:, 0])
    return torch.cat(outs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
# No mask function is registered under this name, so transformers builds no masks at all.
