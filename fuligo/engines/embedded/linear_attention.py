"""Linear attention (gated delta rule) with a state per running request; it replaces operations of transformers' modules.

A prefill computes whole sequences and keeps their final states; a decode step continues from these with one token of each request.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuligo.engines.embedded.attention import AttentionPlan, Segment
from fuligo.engines.embedded.kv_cache import RecurrentShape
from fuligo.models.gated_delta import gated_delta_modules, packed_convolution, rule_by_runs, sequence_ids


def keep_states(model: nn.Module) -> RecurrentShape:
    """Make linear attention layers keep a state per request; return the shape of the states."""
    layers = [StatefulLayer(module) for module in gated_delta_modules(model)]
    if not layers:
        return RecurrentShape()
    module = layers[0].module
    return RecurrentShape(
        layers=tuple(layer.number for layer in layers),
        num_channels=module.conv_dim,
        num_inputs=module.conv_kernel_size - 1,
        num_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
    )


class StatefulLayer:
    """Convolution and delta rule of one layer, in place of transformers' operations.

    transformers passes them the plan of the step as `seq_idx` and `cu_seqlens`. Without a plan they compute the same as transformers.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.number: int = module.layer_idx
        self._rule, self._step = module.chunk_gated_delta_rule, module.recurrent_gated_delta_rule
        module.causal_conv1d_fn = self.convolve
        module.chunk_gated_delta_rule = self.recur

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, seq_idx: AttentionPlan | None) -> Tensor:
        """Convolve channels [1, C, N] causally within sequences, and keep each sequence's last inputs; return [1, C, N]."""
        plan = seq_idx
        if plan is None:
            return packed_convolution(x, weight, bias, activation)
        if plan.cu_seqlens is not None:
            for segment in plan.segments:
                starts, ends, rows = _sequences(plan.cu_seqlens, segment)
                segment.pool.window(self.number)[rows] = last_inputs(x[0], starts, ends, weight.size(1) - 1)
            return packed_convolution(x, weight, bias, activation, sequence_ids(tuple(plan.cu_seqlens), x.device))
        return torch.cat([self._convolve_newest(x[0, :, s.start : s.end], weight, bias, s) for s in plan.segments]).t()[None]

    def _convolve_newest(self, x: Tensor, weight: Tensor, bias: Tensor | None, segment: Segment) -> Tensor:
        """Convolve one input [C, n] of each row with the row's earlier inputs, and keep it; return [n, C]."""
        before = segment.pool.window(self.number)[: x.size(1)]
        inputs = torch.cat([before, x.t()[..., None]], -1)
        before.copy_(inputs[..., 1:])
        out = (inputs * weight).sum(-1)
        return F.silu(out if bias is None else out + bias)

    def recur(
        self, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: AttentionPlan | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Apply the rule to queries and keys [1, N, H, Dk] and values [1, N, H, Dv] within sequences; return [1, N, H, Dv]."""
        plan, inputs = cu_seqlens, (query, key, value, g, beta)
        if plan is None:
            return self._rule(query, key, value, g=g, beta=beta, **options)[0], None
        given = {name: option for name, option in options.items() if name not in ("initial_state", "output_final_state")}
        if plan.cu_seqlens is not None:
            out, states = rule_by_runs(self._rule, inputs, plan.cu_seqlens, output_final_state=bool(plan.segments), **given)
            for segment in plan.segments:
                assert states is not None, "requested with output_final_state"
                first, last = (plan.cu_seqlens.index(border) for border in (segment.start, segment.end))
                _, _, rows = _sequences(plan.cu_seqlens, segment)
                segment.pool.state(self.number)[rows] = states[first:last].float()
            return out, None
        return torch.cat([self._recur_once([x[0, s.start : s.end, None] for x in inputs], s, **given) for s in plan.segments], 1), None

    def _recur_once(self, inputs: Sequence[Tensor], segment: Segment, **options: Any) -> Tensor:
        """Apply the rule to one token of each row [n, 1, ...], and keep the new states; return [1, n, H, Dv]."""
        query, key, value, g, beta = inputs
        before = segment.pool.state(self.number)[: len(query)]
        out, after = self._step(query, key, value, g=g, beta=beta, initial_state=before, output_final_state=True, **options)
        before.copy_(after)
        return out.transpose(0, 1)


def last_inputs(x: Tensor, starts: Tensor, ends: Tensor, number: int) -> Tensor:
    """Return the last `number` inputs [S, C, number] of each sequence in [C, N]; shorter sequences get zeros in front."""
    at = ends[:, None] + torch.arange(-number, 0, device=x.device)
    return x[:, at.clamp(min=0)].where(at >= starts[:, None], 0).transpose(0, 1)


def _sequences(cu_seqlens: Sequence[int], segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
    """Return the starts, ends and pool rows, each [S], of the sequences in one segment of a prefill."""
    inside = [(start, end) for start, end in pairwise(cu_seqlens) if segment.start <= start and end <= segment.end]
    starts, ends = torch.tensor(inside, device=segment.rows.device).unbind(1)
    return starts, ends, segment.rows[ends - 1 - segment.start]
