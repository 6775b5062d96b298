"""GLM-4's layer for Megatron: outputs of attention and MLP have norms, too, and neighbouring elements of a head are rotated together."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
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


class FusedRotationAttention(SelfAttention):
    """Attention whose queries and keys TransformerEngine rotates, in interleaved pairs.

    Megatron-Core 0.16.1 does not tell the fused kernel for packed sequences which pairs to rotate (extensions/transformer_engine.py,
    `fused_apply_rotary_pos_emb_thd`), and without that kernel waits for the GPU several times per layer. So the rotation is done here,
    before it.
    """

    _rotation: tuple[Tensor, PackedSeqParams] | None = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # packed sequences only
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> OutputWithBias:
        self._rotation = (rotary_pos_emb, packed_seq_params)
        try:
            return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [L, 1, heads, D] each."""
        tensors: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, value = tensors
        assert self._rotation is not None
        return self._rotated(query, *self._rotation), self._rotated(key, *self._rotation), value

    def _rotated(self, heads: Tensor, angles: Tensor, packed: PackedSeqParams) -> Tensor:
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb  # pyright: ignore[reportMissingImports]

        group = self.pg_collection.cp
        rotated = apply_rotary_pos_emb(
            heads.squeeze(1),
            angles,
            tensor_format="thd",
            interleaved=True,
            fused=True,
            cu_seqlens=packed.cu_seqlens_q,
            cp_size=group.size(),
            cp_rank=group.rank(),
        )
        return rotated.unsqueeze(1)
