"""Megatron's GPT model as a policy. The last stage returns hidden states instead of logits or a loss."""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage, is_vp_first_stage, is_vp_last_stage
from torch import Tensor

from fuligo.trainer.megatron_backend.layer_spec import block_spec, modules_for, mtp_spec, sum_expert_gradients_over_copies
from fuligo.trainer.megatron_backend.model_config import padded_vocab_size, transformer_config
from fuligo.trainer.megatron_backend.mtp import cut_off, predict, without_gradient
from fuligo.trainer.megatron_backend.packed import PackedRow
from fuligo.trainer.megatron_backend.provider import provided_model, require_weights
from fuligo.trainer.megatron_backend.router import padding_mask
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.sparse_latent_attention import freeze_indexers


class PolicyModel(GPTModel):
    """One pipeline stage. Its `forward` is Megatron's; `run` calls it with a packed row."""

    trains_jointly: bool = False
    """True: the MTP loss also trains the model's layers, the embedding and the head."""
    has_whole_head: bool = False
    """True: the output layer is replicated on all TP ranks, as in a value model, so each rank has the complete gradient of its input."""
    embedding_scale: float = 1.0
    """Factor of the embeddings before the first layer."""
    _row: PackedRow | None = None

    def run(self, row: PackedRow) -> Tensor:
        """Run the stage on a packed row.

        Returns:
            On the last stage, the hidden states [(1 + K) * L, E]: [L, E] after the final norm, followed by [L, E] of each of the K MTP
            layers for which the row has tokens. They are complete on every TP rank; in the backward pass, the ranks' gradients are summed,
            unless each rank computes the whole gradient (`has_whole_head`).
            On other stages, the input of the next stage: [L, 1, E], or [L / tp, 1, E] under sequence parallelism.
        """
        self._row = row
        try:
            return self(
                input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=None, packed_seq_params=row.packed_seq_params
            )
        finally:
            self._row = None
            if not torch.is_grad_enabled():
                row.packed_seq_params.chosen_tokens.clear()  # they are kept for the backward pass only

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Scale embeddings, select the rotary embedding by a tree's positions, and add the padding mask.

        The mask is added on every stage, because Megatron splits it for sequence parallelism on the first stage only.
        """
        assert self._row is not None
        hidden_states, rotary, *prepared, _ = super()._preprocess(*args, **kwargs)
        if self.pre_process and self.embedding_scale != 1:
            # The factor is rounded to the data type of the weights, as in transformers and SGLang.
            hidden_states = hidden_states * torch.tensor(self.embedding_scale, dtype=hidden_states.dtype, device=hidden_states.device)
        positions = self._row.packed_seq_params.positions
        rotary = rotary if rotary is None or positions is None else rotary[positions]
        return hidden_states, rotary, *prepared, padding_mask(self._row, self.config, self.pg_collection.tp)

    def _postprocess(self, hidden_states: Tensor, *_: Any, rotary_pos_emb: Tensor | None = None, **__: Any) -> Tensor:
        """Return hidden states, because the logits of all tokens would take much memory and only those of response tokens are needed."""
        if not self.post_process:
            return hidden_states
        row, states = self._row, [hidden_states]
        assert row is not None
        if row.later:
            mask = padding_mask(row, self.config, self.pg_collection.tp)
            hidden, embedding = (hidden_states, self.embedding) if self.trains_jointly else (cut_off(hidden_states), self._embed_cut_off)
            states += predict(self.mtp, hidden, row, embedding, rotary_pos_emb=rotary_pos_emb, padding_mask=mask)
        return torch.cat([self._whole(state) for state in states]).squeeze(1)

    def _embed_cut_off(self, **tokens: Tensor) -> Tensor:
        """Embed tokens without training the embedding.

        A copy of the embedding that only the MTP layers use gets a gradient of 0, because Megatron may wait for its gradient.
        """
        embedded = self.embedding(**tokens)
        is_idle = not self.pre_process and not self.share_embeddings_and_output_weights
        return without_gradient(embedded) if is_idle else embedded.detach()

    def _whole(self, hidden_states: Tensor) -> Tensor:
        group, is_shared = self.pg_collection.tp, not self.has_whole_head
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=is_shared, group=group)
        if not is_shared:
            return hidden_states
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the last stage's output layer: [padded vocabulary / tp, E], the embedding if tied; [1, E] in a value model."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        assert weight is not None
        return weight


def build_chunks(settings: MegatronTrainerSettings, *, trained: bool) -> list[PolicyModel]:
    """Build this rank's stages of the model on its device with random weights, one per interleaved stage. Call after `join_megatron`.

    Args:
        trained: weights require gradients.

    Raises:
        ConfigError: Megatron cannot build or split the model, or the user's provider returns another model.
    """
    config = transformer_config(settings)
    layout = settings.layout
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    chunks = [_build_stage(settings, config, stage) for stage in stages]
    if settings.model_provider is not None:
        require_weights(settings.model_provider, chunks, settings)
    for chunk in chunks:
        chunk.requires_grad_(trained)
        sum_expert_gradients_over_copies(chunk)
        freeze_indexers(chunk)
        chunk.trains_jointly = settings.mtp.mtp_joint_training
        chunk.embedding_scale = settings.numerics.embedding_scale
        if chunk.mtp_process and not settings.mtp.enable_mtp_training:
            chunk.mtp.requires_grad_(False)
        # TransformerEngine's linear layers accumulate into `main_grad` in the GEMM, without a separate gradient per micro-batch.
        for module in chunk.modules() if settings.fuses_gradient_sums else ():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # pyrefly: ignore[bad-argument-type]
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


def _build_stage(settings: MegatronTrainerSettings, config: Any, vp_stage: int | None) -> PolicyModel:
    layout = settings.layout
    vp_size = layout.vpp if layout.vpp > 1 else None
    pp_group: Any = parallel_state.get_pipeline_model_parallel_group()
    is_first = is_pp_first_stage(pp_group) and is_vp_first_stage(vp_stage or 0, vp_size)
    is_last = is_pp_last_stage(pp_group) and is_vp_last_stage(vp_stage or 0, vp_size)
    build_default = partial(_default_stage, settings, config)
    if settings.model_provider is None:
        return build_default(is_first, is_last, vp_stage)
    model = provided_model(settings.model_provider, build_default, PolicyModel, is_first, is_last, vp_stage)
    return model.to(settings.device)


def _default_stage(settings: MegatronTrainerSettings, config: Any, is_first: bool, is_last: bool, vp_stage: int | None) -> PolicyModel:
    flags, modules = settings.model_flags, modules_for(settings)
    layers: Any = block_spec(config, settings, modules, vp_stage=vp_stage)
    mtp: Any = mtp_spec(config, settings, modules) if is_last else None
    return PolicyModel(
        config,
        layers,
        vocab_size=padded_vocab_size(settings),
        max_sequence_length=flags["max_position_embeddings"],
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=not flags.get("untie_embeddings_and_output_weights", False),
        position_embedding_type="rope",
        rotary_percent=flags.get("rotary_percent", 1.0),
        rotary_base=flags.get("rotary_base", 10_000),
        seq_len_interpolation_factor=flags.get("rotary_seq_len_interpolation_factor"),
        rope_scaling=bool(flags.get("use_rope_scaling")),  # Llama 3's
        rope_scaling_factor=flags.get("rope_scaling_factor", 8.0),
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    ).to(settings.device)
