"""Megatron's GPT model as a policy: its last stage gives hidden states, from which log-probabilities are computed elsewhere."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage, is_vp_first_stage, is_vp_last_stage
from torch import Tensor

from fuligo.trainer.megatron_backend.layer_spec import block_spec, modules_for
from fuligo.trainer.megatron_backend.model_config import is_tied, padded_vocab_size, rotary, transformer_config
from fuligo.trainer.megatron_backend.packed import PackedRow
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings


class PolicyModel(GPTModel):
    """One pipeline stage. Its `forward` is Megatron's; `run` calls it with a packed row."""

    def run(self, row: PackedRow) -> Tensor:
        """
        Returns:
            On the last stage the hidden states [L, E] after the final norm, complete on every TP rank; the gradients that the TP ranks give
            for them are summed. Elsewhere what the next stage takes, [L, 1, E], or [L / tp, 1, E] under sequence parallelism.
        """
        return self(input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=None, packed_seq_params=row.packed_seq_params)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """In the place of logits or a loss: the logits of all tokens would take more memory than all else, and few are needed."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)
        else:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=self.pg_collection.tp)
        return hidden_states.squeeze(1)

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / tp, E] of the last stage: the embedding's where both are one."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight


def build_chunks(settings: MegatronTrainerSettings, *, trained: bool) -> list[PolicyModel]:
    """This rank's stages of the model on its device, one per interleaved stage, with random weights. After `join_megatron`.

    Args:
        trained: the weights get gradients.

    Raises:
        ConfigError: Megatron cannot build the model, or cannot split it so.
    """
    config = transformer_config(settings)
    layout = settings.layout
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    chunks = [_build_stage(settings, config, stage) for stage in stages]
    for chunk in chunks:
        chunk.requires_grad_(trained)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


def _build_stage(settings: MegatronTrainerSettings, config: Any, vp_stage: int | None) -> PolicyModel:
    flags, layout = settings.model_flags, settings.layout
    embedding = rotary(flags)
    vp_size = layout.vpp if layout.vpp > 1 else None
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    is_first = is_pp_first_stage(pp_group) and is_vp_first_stage(vp_stage, vp_size)
    is_last = is_pp_last_stage(pp_group) and is_vp_last_stage(vp_stage, vp_size)
    modules = modules_for(settings.device)
    return PolicyModel(
        config,
        block_spec(config, flags, modules, vp_stage=vp_stage),
        vocab_size=padded_vocab_size(settings),
        max_sequence_length=flags["max_position_embeddings"],
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=is_tied(flags),
        position_embedding_type="rope",
        rotary_percent=embedding.percent,
        rotary_base=embedding.base,
        rope_scaling=embedding.llama3_factor is not None,
        rope_scaling_factor=embedding.llama3_factor or 1.0,
        vp_stage=vp_stage,
    ).to("cuda" if settings.device == "cuda" else "cpu")
