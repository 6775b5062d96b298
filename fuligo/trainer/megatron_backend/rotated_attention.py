"""Grouped-query attention with special rotary embeddings: interleaved pairs on a GPU (GLM-4), another base in window layers (Gemma 3)."""

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

OutputWithBias = tuple[Tensor, Tensor | None]


class WindowRotaryAttention(SelfAttention):
    """Attention of a layer with a sliding window that uses a different rotary base and no scaling of positions.

    Args:
        rotary: rotary embedding; pass the same object to all such layers, so that they share its cache of angles.
    """

    def __init__(self, *args: Any, rotary: RotaryEmbedding, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own_rotary = rotary

    def forward(  # pyrefly: ignore[bad-override]  # packed sequences only
        self, *args: Any, rotary_pos_emb: Tensor, packed_seq_params: PackedSeqParams, **kwargs: Any
    ) -> OutputWithBias:
        positions = getattr(packed_seq_params, "positions", None)  # set if the row has a tree
        angles = self._own_rotary(len(rotary_pos_emb), packed_seq=True)
        angles = angles if positions is None else angles[positions]
        return super().forward(*args, rotary_pos_emb=angles, packed_seq_params=packed_seq_params, **kwargs)


def window_rotary(config: TransformerConfig, base: float | None) -> RotaryEmbedding | None:
    """Build the rotary embedding of layers with a sliding window; None if `base` is None: they use that of the other layers."""
    if base is None:
        return None
    assert config.kv_channels is not None
    return RotaryEmbedding(
        config.kv_channels,
        rotary_percent=1.0,
        rotary_interleaved=config.rotary_interleaved,
        rotary_base=base,  # pyrefly: ignore[bad-argument-type]
        use_cpu_initialization=config.use_cpu_initialization,
    )


class FusedRotationAttention(SelfAttention):
    """Attention whose queries and keys are rotated in interleaved pairs by TransformerEngine's fused kernel.

    Megatron-Core 0.16.1 does not pass `interleaved` to the fused kernel for packed sequences (extensions/transformer_engine.py,
    `fused_apply_rotary_pos_emb_thd`), and its unfused version synchronizes the GPU several times per layer. The kernel is therefore called
    here, and Megatron's rotation is disabled.
    """

    _rotation: tuple[Tensor, PackedSeqParams] | None = None

    def forward(  # pyrefly: ignore[bad-override]  # packed sequences only
        self, *args: Any, rotary_pos_emb: Tensor, packed_seq_params: PackedSeqParams, **kwargs: Any
    ) -> OutputWithBias:
        self._rotation = (rotary_pos_emb, packed_seq_params)
        try:
            return super().forward(*args, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, [L, 1, heads, D] each."""
        tensors: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, value = tensors
        assert self._rotation is not None
        return self._rotated(query, *self._rotation), self._rotated(key, *self._rotation), value

    def _rotated(self, heads: Tensor, angles: Tensor, packed: PackedSeqParams) -> Tensor:
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

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
