"""Multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that each predict one token further ahead.

Megatron-Core's layers (transformer/multi_token_prediction.py) are used, but tokens are shifted when the row is packed, because Megatron's
shift communicates with context-parallel neighbors for every sequence, and its loss has no token weights.
"""

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from fuligo.errors import ConfigError
from fuligo.trainer.megatron_backend.packed import PackedRow
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings


class MTPLayer(MultiTokenPredictionLayer):
    """MTP layer: joins each token's hidden state with the embedding of a later token, and applies a transformer layer to them."""

    def forward(  # pyrefly: ignore[bad-override]
        self,
        hidden: Tensor,
        embedded: Tensor,
        *,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: PackedSeqParams,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """Transform hidden states and embeddings of later tokens, [L, 1, E] each, or [L / tp, 1, E] under sequence parallelism.

        `hidden` is the output of the final norm of the model or of the previous MTP layer; the result is the output of this layer's norm.
        """

        def run(hidden: Tensor, embedded: Tensor, rotary_pos_emb: Tensor | None, padding_mask: Tensor | None) -> Tensor:
            joined = self._concat_embeddings(hidden, embedded)
            transformed, _ = self.transformer_layer(
                hidden_states=joined,
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                padding_mask=padding_mask,
            )
            return self._postprocess(transformed)

        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(run, False, hidden, embedded, rotary_pos_emb, padding_mask)
        return run(hidden, embedded, rotary_pos_emb, padding_mask)


def mtp_submodules(num_layers: int, layer: ModuleSpec, modules: BackendSpecProvider) -> MultiTokenPredictionBlockSubmodules:
    spec = get_mtp_layer_spec_for_backend(layer, modules)
    spec.module = MTPLayer
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * num_layers)


def refuse_idle_embedding(settings: MegatronTrainerSettings) -> None:
    """Refuse a layout in which Megatron would wait forever for a gradient.

    Raises ConfigError if gradient reduction overlaps with the backward pass (`--overlap-grad-reduce`), but the last stage has a copy of the
    embedding for the MTP layers that gets no gradient.
    """
    flags, num_layers = settings.model_flags, settings.num_mtp_layers
    is_idle = num_layers > 0 and not settings.mtp.enable_mtp_training and settings.layout.pp > 1
    if is_idle and flags.get("untie_embeddings_and_output_weights") and flags.get("overlap_grad_reduce"):
        raise ConfigError(
            f"--overlap-grad-reduce with --mtp-num-layers {num_layers} and {settings.layout.pp} pipeline stages needs "
            "--enable-mtp-training: without it, the last stage's copy of the embedding for the MTP layers gets no gradient; add it, or "
            "remove --overlap-grad-reduce"
        )


def predict(
    block: MultiTokenPredictionBlock,
    hidden: Tensor,
    row: PackedRow,
    embedding: Callable[..., Tensor],
    *,
    rotary_pos_emb: Tensor | None,
    padding_mask: Tensor | None,
) -> list[Tensor]:
    """Run the MTP layers, each on the hidden states of the previous one; return each layer's hidden states, in the shape of `hidden`.

    Args:
        block: MTP layers, one for each entry of `row.later`.
        hidden: [L, 1, E] (or [L / tp, 1, E] under sequence parallelism) hidden states after the model's final norm; detached (`cut_off`) if
            the MTP loss does not train the model.
        row: packed row with its tokens shifted for each layer.
        embedding: the model's embedding; its output is detached if the MTP loss does not train the model.
    """
    states = [hidden]
    for layer, tokens in zip(block.layers, row.later, strict=True):
        embedded = embedding(input_ids=tokens.input_ids, position_ids=row.position_ids)
        states.append(
            layer(states[-1], embedded, rotary_pos_emb=rotary_pos_emb, packed_seq_params=row.packed_seq_params, padding_mask=padding_mask)
        )
    return states[1:]


def cut_off(hidden: Tensor) -> Tensor:
    """Detach hidden states. The result still requires a gradient, because Megatron recomputes only layers whose input requires one."""
    return hidden.detach().requires_grad_()


def without_gradient(values: Tensor) -> Tensor:
    """Return the same values, through which the backward pass sends a gradient of 0."""
    return torch.where(torch.ones((), dtype=torch.bool, device=values.device), values.detach(), values)
