"""Multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that each predict one token further.

Megatron-Core's layers (transformer/multi_token_prediction.py) are used with tokens that are shifted while the row is packed, sequence by
sequence: its own shift communicates with the context-parallel neighbors for every sequence, and its loss has no token weights.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
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
from fuligo.trainer.megatron_backend.logprobs import vocab_parallel_logprobs
from fuligo.trainer.megatron_backend.packed import PackedRow
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings


class MTPLayer(MultiTokenPredictionLayer):
    """MTP layer: joins each token's hidden state with the embedding of a later token, and transforms them as a layer of the model does."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden: Tensor,
        embedded: Tensor,
        *,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: PackedSeqParams,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """Transform hidden states and the embeddings of later tokens, [L, 1, E] each, or L / tp under sequence parallelism.

        The hidden states come from the final norm of the model, or of the MTP layer before; so does the result, from this layer's.
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

    Raises ConfigError if the last stage would hold the MTP layers' copy of the embedding, which gets no gradient.
    """
    flags, num_layers = settings.model_flags, settings.num_mtp_layers
    is_idle = num_layers > 0 and not settings.mtp.enable_mtp_training and settings.layout.pp > 1
    if is_idle and flags.get("untie_embeddings_and_output_weights") and flags.get("overlap_grad_reduce"):
        raise ConfigError(
            f"--overlap-grad-reduce with --mtp-num-layers {num_layers} and {settings.layout.pp} pipeline stages needs "
            "--enable-mtp-training: the last stage has a copy of the embedding for the layers, which gets no gradient without it"
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
    """Return the hidden states of each MTP layer, which takes those of the layer before; [L, 1, E], or L / tp under sequence parallelism.

    Args:
        block: one layer for each of `row.later`.
        hidden: hidden states of the model after its final norm; `cut_off` from it if the MTP loss does not train it.
        row: packed row with its tokens shifted for each layer.
        embedding: the model's, cut off likewise.
    """
    states = [hidden]
    for layer, tokens in zip(block.layers, row.later, strict=True):
        embedded = embedding(input_ids=tokens.input_ids, position_ids=row.position_ids)
        states.append(
            layer(states[-1], embedded, rotary_pos_emb=rotary_pos_emb, packed_seq_params=row.packed_seq_params, padding_mask=padding_mask)
        )
    return states[1:]


def cut_off(hidden: Tensor) -> Tensor:
    """Cut off the gradient. The values still require one, since Megatron recomputes only between inputs that do and a loss."""
    return hidden.detach().requires_grad_()


def without_gradient(values: Tensor) -> Tensor:
    """Return the same values, with a gradient of 0 to their source."""
    return torch.where(torch.ones((), dtype=torch.bool, device=values.device), values.detach(), values)


def mtp_logprobs(
    hidden: Tensor, weight: Tensor, row: PackedRow, targets: Tensor, *, chunk_tokens: int, num_vocab: int, tp_group: dist.ProcessGroup
) -> Iterator[Tensor]:
    """Yield [m] log-probabilities by each MTP layer of the response tokens `local_ids` of its `row.later`.

    Args:
        hidden: [(1 + K) * L, E] result of `PolicyModel.run` for `row`.
        weight: [V' / tp, E] of the output layer; detached if the loss does not train it.
        targets: [N] the micro-batch's response tokens.
    """
    length = row.input_ids.size(1)
    for number, tokens in enumerate(row.later, start=1):
        yield vocab_parallel_logprobs(
            hidden[number * length + tokens.local_rows],
            weight,
            targets[tokens.local_ids],
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            num_vocab=num_vocab,
            tp_group=tp_group,
        ).logprobs
