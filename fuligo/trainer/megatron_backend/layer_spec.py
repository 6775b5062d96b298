"""Specs of a model's layers: TransformerEngine's modules on CUDA, else Megatron's local modules with packed attention."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from fuligo.trainer.megatron_backend.core_attention import PackedCoreAttention
from fuligo.trainer.megatron_backend.latent_attention import latent_attention
from fuligo.trainer.megatron_backend.mtp import mtp_submodules
from fuligo.trainer.megatron_backend.rotated_attention import FusedRotationAttention, OutputWithBias, WindowRotaryAttention, window_rotary
from fuligo.trainer.megatron_backend.router import PackedRouter
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.sparse_latent_attention import sparse_latent_attention

Add = Callable[[OutputWithBias, Tensor, float], Tensor]


class SandwichLayer(TransformerLayer):
    """Layer with four norms: before and after attention, before and after the MLP."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: type, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon) for _ in range(2)
        )
        self.self_attn_bda = _norm_and_add(self.post_self_attn_layernorm)
        self.mlp_bda = _norm_and_add(self.post_mlp_layernorm)


def _norm_and_add(norm: nn.Module) -> Callable[[bool, bool], Add]:
    """Return the function that Megatron calls to add an output to the residual stream; it first applies the norm to the output."""

    def choose(training: bool, fused: bool) -> Add:
        add = get_bias_dropout_add(training, fused)

        def norm_and_add(output_with_bias: OutputWithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return norm_and_add

    return choose


class LocalNorm(nn.RMSNorm):
    """RMSNorm of torch with the constructor arguments and the `sequence_parallel` attribute that Megatron expects.

    The weight may be stored centered around zero (`--apply-layernorm-1p`).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.is_around_zero = config.layernorm_zero_centered_gamma
        # Under sequence parallelism each TP rank sees only its part of the tokens, so Megatron must sum the gradient over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_around_zero:
            return super().forward(x)
        # In float32 up to the product with the weight, as in transformers, because bfloat16 would round small weights away.
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class LocalModules(LocalSpecProvider):
    """Megatron's local modules, but with a norm for all layouts and attention over packed sequences."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return LocalNorm

    def core_attention(self) -> type:
        return PackedCoreAttention


def modules_for(settings: MegatronTrainerSettings) -> BackendSpecProvider:
    """Return the modules of layers: TransformerEngine's on CUDA, else `LocalModules`.

    `PackedCoreAttention` replaces TransformerEngine's attention on request, and where TransformerEngine has no kernel: in float32, for
    samples that share prefixes, and for sliding windows under context parallelism. With an adapter, norms are separate layers.
    """
    if settings.device == "cpu":
        return LocalModules()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    has_cut_windows = settings.layout.cp > 1 and settings.model_flags.get("window_size") is not None
    packed = settings.attention_backend == "local" or settings.precision == "fp32" or settings.shares_prefixes or has_cut_windows

    class Modules(TESpecProvider):
        def core_attention(self) -> type:
            return PackedCoreAttention if packed else super().core_attention()

        def fuse_layernorm_and_linear(self) -> bool:
            return settings.lora is None  # an adapter needs the norm's output

        def column_parallel_layer_norm_linear(self) -> type | None:
            return super().column_parallel_layer_norm_linear() if settings.lora is None else None

    return Modules()


def block_spec(
    config: TransformerConfig, settings: MegatronTrainerSettings, modules: BackendSpecProvider, *, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers and the final norm of this rank's pipeline stage.

    Args:
        vp_stage: index of the stage among the rank's interleaved stages; None if the rank has one stage.
    """
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    rotary = window_rotary(config, settings.numerics.window_rotary_base)
    layers = [
        layer_spec(
            config, settings, attention_spec(config, settings, modules, number, rotary), modules, is_moe=is_moe_layer(config, number)
        )
        for number in numbers
    ]
    norm: Any = modules.layer_norm(rms_norm=True)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def mtp_spec(
    config: TransformerConfig, settings: MegatronTrainerSettings, modules: BackendSpecProvider
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of the MTP layers, each of which contains a layer like the model's last one; None if there are no MTP layers."""
    if not config.mtp_num_layers:
        return None
    attention = attention_spec(config, settings, modules, None)
    layer = layer_spec(config, settings, attention, modules, is_moe=is_moe_layer(config, config.num_layers - 1))
    return mtp_submodules(config.mtp_num_layers, layer, modules)


def attention_spec(
    config: TransformerConfig,
    settings: MegatronTrainerSettings,
    modules: BackendSpecProvider,
    number: int | None,
    rotary: RotaryEmbedding | None = None,
) -> ModuleSpec:
    """Return the spec of a layer's attention.

    Args:
        number: index of the layer, counted from 0 over all stages; None for an MTP layer.
        rotary: rotary embedding of layers with a sliding window; None: the same as that of the other layers.
    """
    if settings.sparse_layers is not None:
        return sparse_latent_attention(modules, settings.sparse_layers, number)
    if config.multi_latent_attention:
        return latent_attention(modules)
    has_window = number is not None and is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number + 1)  # pyrefly: ignore[bad-argument-type]
    return grouped_attention(config, modules, rotary if has_window else None)


def layer_spec(
    config: TransformerConfig, settings: MegatronTrainerSettings, attention: ModuleSpec, modules: BackendSpecProvider, *, is_moe: bool
) -> ModuleSpec:
    """Return the spec of a layer with this attention, and with a dense MLP or experts. TransformerEngine fuses norms into linear layers."""
    norm = modules.layer_norm(rms_norm=True)
    in_linear = IdentityOp if modules.fuse_layernorm_and_linear() else norm
    add: Any = get_bias_dropout_add
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm if config.multi_latent_attention else in_linear,
        self_attention=attention,
        self_attn_bda=add,
        pre_mlp_layernorm=norm if is_moe else in_linear,
        mlp=mixture(config, modules) if is_moe else get_mlp_module_spec_for_backend(modules),
        mlp_bda=add,
    )
    if settings.model_flags.get("post_self_attn_layernorm") or settings.model_flags.get("post_mlp_layernorm"):
        return ModuleSpec(SandwichLayer, params={"norm": norm}, submodules=submodules)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def grouped_attention(config: TransformerConfig, modules: BackendSpecProvider, own_rotary: RotaryEmbedding | None) -> ModuleSpec:
    """Return the spec of grouped-query attention. `own_rotary`: separate rotary embedding of the layer; None: that of the model."""
    head_norm = modules.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    fused = modules.column_parallel_layer_norm_linear()
    module, own = SelfAttention, {}
    if own_rotary is not None:
        module, own = WindowRotaryAttention, {"rotary": own_rotary}
    elif config.rotary_interleaved and config.apply_rope_fusion:
        module = FusedRotationAttention
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal, **own},
        submodules=SelfAttentionSubmodules(
            linear_qkv=fused or modules.column_parallel_linear(),
            core_attention=modules.core_attention(),
            linear_proj=modules.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def mixture(config: TransformerConfig, modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of router, shared experts and routed experts (grouped GEMM with TransformerEngine, else one after another)."""
    spec = get_moe_module_spec_for_backend(modules, config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    assert isinstance(spec.submodules, MoESubmodules)
    spec.submodules.router = PackedRouter
    return spec


def sum_expert_gradients_over_copies(model: nn.Module) -> None:
    """Make Megatron sum the gradients of routed experts over all ranks that hold copies of them.

    Megatron does so only if experts are distributed (EP > 1). Otherwise it sums them like those of other weights, over the data-parallel
    ranks, and omits the TP ranks that hold copies of the experts if ETP < TP.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.experts, nn.Module)
            for parameter in module.experts.parameters():
                parameter.allreduce = False  # pyrefly: ignore[missing-attribute]


def is_moe_layer(config: TransformerConfig, number: int) -> bool:
    """Return whether layer `number`, counted from 0 over all stages, has experts."""
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return number % frequency == 0 if isinstance(frequency, int) else bool(frequency[number])
