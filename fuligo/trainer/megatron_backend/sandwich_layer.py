"""Layer of GLM-4 and Gemma 3 for Megatron: the outputs of attention and MLP also have norms."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

OutputWithBias = tuple[Tensor, Tensor | None]
Add = Callable[[OutputWithBias, Tensor, float], Tensor]


@dataclass
class SandwichLayerSubmodules(TransformerLayerSubmodules):
    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


def sandwich(submodules: TransformerLayerSubmodules, norm: type) -> ModuleSpec:
    """Return the spec of a `SandwichLayer`, which has these modules and two more norms."""
    given = {field.name: getattr(submodules, field.name) for field in fields(submodules)}
    return ModuleSpec(SandwichLayer, submodules=SandwichLayerSubmodules(**given, post_self_attn_layernorm=norm, post_mlp_layernorm=norm))


class SandwichLayer(TransformerLayer):
    """Layer with four norms: before and after attention, before and after the MLP."""

    def __init__(self, config: TransformerConfig, submodules: SandwichLayerSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)

        def norm(spec: ModuleSpec | type) -> nn.Module:
            built: Any = build_module(spec, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            return built

        self.post_self_attn_layernorm = norm(submodules.post_self_attn_layernorm)
        self.post_mlp_layernorm = norm(submodules.post_mlp_layernorm)
        self.self_attn_bda = _norm_and_add(self.post_self_attn_layernorm)
        self.mlp_bda = _norm_and_add(self.post_mlp_layernorm)


def _norm_and_add(norm: nn.Module) -> Callable[[bool, bool], Add]:
    """Return the function that Megatron calls to add an output to the residual stream, with a norm of the output before."""

    def choose(training: bool, fused: bool) -> Add:
        add = get_bias_dropout_add(training, fused)

        def norm_and_add(output_with_bias: OutputWithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return norm_and_add

    return choose
