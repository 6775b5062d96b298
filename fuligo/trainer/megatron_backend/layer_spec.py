"""Which modules the layers of a model are made of: TransformerEngine's on CUDA, Megatron's own around packed attention elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from fuligo.models.glm4.megatron import sandwich
from fuligo.trainer.megatron_backend.core_attention import PackedCoreAttention


class LocalNorm(nn.RMSNorm):
    """torch's RMSNorm, which Megatron's wrapper of it refuses under sequence parallelism for want of the mark that is set here."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # its gradient is a sum over the TP ranks' tokens


class LocalModules(LocalSpecProvider):
    """Megatron's own modules, with a norm for all layouts and attention for packed sequences."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return LocalNorm

    def core_attention(self) -> type:
        return PackedCoreAttention


def modules_for(device: str) -> BackendSpecProvider:
    """What layers are made of on a device of this type."""
    if device == "cuda":
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return LocalModules()


def block_spec(
    config: TransformerConfig, flags: Mapping[str, Any], modules: BackendSpecProvider, *, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, and the final norm.

    Args:
        flags: MODEL_ARGS.
        vp_stage: which of the rank's interleaved stages; None: it has one.
    """
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    layer = layer_spec(config, flags, modules)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=modules.layer_norm(rms_norm=True))


def layer_spec(config: TransformerConfig, flags: Mapping[str, Any], modules: BackendSpecProvider) -> ModuleSpec:
    """A layer with grouped attention and a dense MLP."""
    norm = modules.layer_norm(rms_norm=True)
    before = IdentityOp if modules.fuse_layernorm_and_linear() else norm
    submodules = TransformerLayerSubmodules(
        input_layernorm=before,
        self_attention=grouped_attention(config, modules),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=before,
        mlp=get_mlp_module_spec_for_backend(modules),
        mlp_bda=get_bias_dropout_add,
    )
    if flags.get("post_self_attn_layernorm") or flags.get("post_mlp_layernorm"):
        return sandwich(submodules, norm)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def grouped_attention(config: TransformerConfig, modules: BackendSpecProvider) -> ModuleSpec:
    head_norm = modules.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    fused = modules.column_parallel_layer_norm_linear()
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=fused or modules.column_parallel_linear(),
            core_attention=modules.core_attention(),
            linear_proj=modules.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
