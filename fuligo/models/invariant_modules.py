"""Batch-invariant forward passes that replace those of transformers' modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from fuligo.models.batch_invariant import linear, rms_norm, round_weight, silu, softmax
from fuligo.models.gpu_invariant import experts, rotate, route, swiglu

ROW_PARALLEL = ("o_proj", "down_proj")
"""Linear layers whose inputs are split over the tensor-parallel GPUs of an engine."""


class InvariantLinear:
    """Forward pass of a linear layer. It can keep the rounded weight, for engines, which decode one token at a time.

    Args:
        keeps_weight: round the weight once, until `forget`; otherwise in every call.
        dtype: dtype of the result; None: that of the input.
        ranks: number of the engine's GPUs that split the layer's inputs.
    """

    def __init__(self, layer: nn.Linear, *, keeps_weight: bool, dtype: torch.dtype | None = None, ranks: int = 1) -> None:
        self._layer = layer
        self._keeps_weight = keeps_weight
        self._dtype = dtype
        self._ranks = ranks
        self._rounded: list[Tensor] | None = None

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if self._keeps_weight and self._rounded is None:
            self._rounded = round_weight(layer.weight)
        return linear(input, layer.weight, layer.bias, rounded=self._rounded, dtype=self._dtype or input.dtype, ranks=self._ranks)

    def forget(self) -> None:
        """Drop the rounded weight, because the weight has changed."""
        self._rounded = None


class InvariantModel:
    """Model whose linear layers, experts, RMSNorms and activations are batch-invariant; the caller must replace the attention function.

    The modules are changed in place. Logits are float32, not rounded to the model's type.

    Args:
        keeps_weights: `keeps_weight` of `InvariantLinear`; the caller must call `forget_weights` whenever weights change.
        ranks: tensor-parallel GPUs of the engine whose rounding is reproduced; ignored on a CPU.
    """

    def __init__(self, model: Any, *, keeps_weights: bool = False, ranks: int = 1) -> None:
        head = model.get_output_embeddings()
        self._layers: list[InvariantLinear | InvariantExperts] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                dtype = torch.float32 if module is head else None
                parts = ranks if name.endswith(ROW_PARALLEL) else 1
                module.forward = InvariantLinear(module, keeps_weight=keeps_weights, dtype=dtype, ranks=parts)
                self._layers.append(module.forward)
            elif type(module).__name__ == "Qwen3MoeTopKRouter":
                module.forward = partial(route_tokens, module)
            elif type(module).__name__ == "Qwen3MoeExperts":
                module.forward = InvariantExperts(module, keeps_weights=keeps_weights, ranks=ranks)
                self._layers.append(module.forward)
            elif type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module)
            elif hasattr(module, "act_fn"):
                module.act_fn.forward = silu
                module.forward = partial(_mlp, module, module.forward)
            elif hasattr(module, "o_proj"):
                module.forward = partial(_attend, module, module.forward)

    def forget_weights(self) -> None:
        for layer in self._layers:
            layer.forget()


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


def _mlp(mlp: Any, ordinary: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a SwiGLU MLP, on a GPU with one kernel for the activation. `ordinary`: the module's own forward pass."""
    return mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x))) if x.is_cuda else ordinary(x)


def _attend(
    layer: Any,
    ordinary: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    **given: Any,
) -> Any:
    """Compute attention in Llama and Qwen models, on a GPU with one kernel for rotary embeddings. `ordinary`: as in `_mlp`."""
    if not hidden_states.is_cuda:
        return ordinary(hidden_states=hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **given)
    query, key, value = (each(hidden_states).unflatten(-1, (-1, layer.head_dim)) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    cos, sin = (each[0] for each in position_embeddings)
    query, key = (rotate(each[0], cos, sin)[None] for each in (query, key))
    attend = AttentionInterface()[layer.config._attn_implementation]
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    out, weights = attend(layer, *heads_first, attention_mask, dropout=0.0, scaling=layer.scaling, **given)
    return layer.o_proj(out.flatten(2)), weights


def route_tokens(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Qwen3-MoE's router; the weights of a token's experts are summed in a fixed order."""
    logits = linear(hidden_states.reshape(-1, router.hidden_dim), router.weight, None, dtype=hidden_states.dtype)
    if logits.is_cuda:
        weights, chosen = route(logits, router.top_k, renormalize=router.norm_topk_prob)
        return logits, weights, chosen
    weights, chosen = softmax(logits).topk(router.top_k, dim=-1)
    if router.norm_topk_prob:
        weights = weights / sum(weights.split(1, dim=-1))
    return logits, weights.to(logits.dtype), chosen


class InvariantExperts:
    """Forward pass of Qwen3-MoE's experts, independent of the choices of other tokens. `ranks`: GPUs that split every expert.

    On a CPU the outputs of a token's experts are added in the order of the experts' indices, on a GPU in the order of the router's choices.
    """

    def __init__(self, experts: Any, *, keeps_weights: bool, ranks: int = 1) -> None:
        self._experts = experts
        self._keeps_weights = keeps_weights
        self._ranks = ranks
        self._rounded: dict[tuple[str, int], list[Tensor]] = {}

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if hidden_states.is_cuda:
            matrices = self._experts.gate_up_proj, self._experts.down_proj
            return experts(hidden_states, *matrices, top_k_weights, top_k_index, ranks=self._ranks)
        total = torch.zeros_like(hidden_states)
        matrices = {name: getattr(self._experts, name).unbind() for name in ("gate_up_proj", "down_proj")}

        def project(x: Tensor, name: str, number: int) -> Tensor:
            weight = matrices[name][number]
            return linear(x, weight, None, rounded=self._round(weight, name, number), dtype=x.dtype)

        for number in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == number)
            gate, up = project(hidden_states[tokens], "gate_up_proj", number).chunk(2, dim=-1)
            out = project(silu(gate) * up, "down_proj", number) * top_k_weights[tokens, places, None]
            total = total.index_add(0, tokens, out.to(total.dtype))
        return total

    def _round(self, weight: Tensor, name: str, number: int) -> list[Tensor] | None:
        if not self._keeps_weights:
            return None
        if (name, number) not in self._rounded:
            self._rounded[name, number] = round_weight(weight)
        return self._rounded[name, number]

    def forget(self) -> None:
        """Drop the rounded weights, because the weights have changed."""
        self._rounded = {}
