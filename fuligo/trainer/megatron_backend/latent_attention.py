"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with correct gradients under tensor parallelism.

In Megatron-Core 0.16.1 (transformer/multi_latent_attention.py), each TP rank has a copy of the keys' rotary part, which all heads share.
Its gradient is summed over the ranks only with TransformerEngine's layers under sequence parallelism. Megatron's local layers split the
down projections over the ranks and never sum it. Without sequence parallelism, Megatron also sums the gradient of `q_layernorm` (found by
name) over the ranks, although it is already complete on each.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn


def latent_attention(modules: BackendSpecProvider, *, norms_apart: bool = False) -> ModuleSpec:
    """Return the spec of latent attention.

    With TransformerEngine, norms are fused into the up projections, except with an adapter or `norms_apart`.
    """
    is_local = isinstance(modules, LocalSpecProvider)
    fused = None if norms_apart else modules.column_parallel_layer_norm_linear()
    up = fused or modules.column_parallel_linear()
    norm = IdentityOp if fused else modules.layer_norm(rms_norm=True, for_qk=True)
    # Only TransformerEngine has a replicated linear layer; `LatentAttention` replaces the local ones.
    down = modules.column_parallel_linear() if is_local else modules.linear()  # pyrefly: ignore[missing-attribute]
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=modules.column_parallel_linear(),
            linear_q_down_proj=down,
            linear_q_up_proj=up,
            linear_kv_down_proj=down,
            linear_kv_up_proj=up,
            core_attention=modules.core_attention(),
            linear_proj=modules.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def new_weight(config: MLATransformerConfig, num_rows: int, num_columns: int, *generator: str) -> nn.Parameter:
    """Create a [num_rows, num_columns] weight, initialized with Megatron's random state `generator`; default: the TP rank's own."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = nn.Parameter(torch.empty(num_rows, num_columns, dtype=config.params_dtype, device=device))
    if config.perform_initialization:
        tracker = get_cuda_rng_tracker()
        assert config.init_method is not None and tracker is not None
        with tracker.fork(*generator):
            config.init_method(weight)
    return weight


class DownProjection(nn.Module):
    """Linear layer replicated on all TP ranks, like TransformerEngine's "duplicated" one: `[tokens, in] -> [tokens, out]`."""

    def __init__(self, in_features: int, out_features: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = new_weight(config, out_features, in_features, get_data_parallel_rng_tracker_name())  # the same on every TP rank
        # Under sequence parallelism each rank sees only its part of the tokens, so Megatron must sum the gradient over the TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the product, and None for the bias, like Megatron's linear layers."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Self-attention of MLA models. `qk_layernorm` must be off in the configuration, because the layer spec contains the norms."""

    _positions: Tensor | None = None
    """[T] positions of a tree's tokens; None if the row has no tree."""

    def __init__(self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        assert not config.qk_layernorm, "qk_layernorm must be off: Megatron would sum equal gradients of q_layernorm over the TP ranks"
        if submodules.linear_kv_down_proj is ColumnParallelLinear:
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = DownProjection(config.hidden_size, config.q_lora_rank, config)
            self.linear_kv_down_proj = DownProjection(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        for down in (self.linear_kv_down_proj, *([self.linear_q_down_proj] if config.q_lora_rank is not None else [])):
            # TransformerEngine marks every matrix as split over the TP ranks, so the gradient norm would count each rank's copy.
            down.weight.tensor_model_parallel = False  # pyrefly: ignore[missing-attribute]
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(self._sum_rotary_gradient)  # pyrefly: ignore[missing-attribute]
        self.rotary_pos_emb.register_forward_hook(self._take_positions)

    def get_query_key_value_tensors(  # pyrefly: ignore[bad-override]  # arguments of inference go through
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return queries, keys and values; in a tree, rotary embeddings use the tokens' positions in their samples."""
        self._positions = getattr(packed_seq_params, "positions", None)
        try:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs)
        finally:
            self._positions = None

    def _take_positions(self, module: nn.Module, inputs: object, angles: Any) -> Any:
        """Select the rotary angles by the positions of a tree's tokens; Megatron would use their positions in the row."""
        if self._positions is None:
            return angles
        if isinstance(angles, tuple):  # (angles, YaRN's factor)
            return angles[0][self._positions], *angles[1:]
        return angles[self._positions]

    def _sum_rotary_gradient(self, module: nn.Module, inputs: object, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        """Sum the gradient of the rotary columns (the last ones) over the ranks' heads; that of the others is already summed."""
        latent, rotary = output[0].split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, SumGradient.apply(rotary, self.tp_group)], dim=-1), None


class SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks. (Megatron's version loses the sum if the gradient is not contiguous.)"""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
