"""Sparse latent attention whose choice of tokens several layers share (GLM-5, arXiv 2603.12201).

Megatron-Core 0.16.1 has experimental sparse attention (transformer/experimental_attention_variant/dsa.py), but it supports neither packed
rows nor context parallelism, has an indexer in every layer, and rotates the last elements of the indexer's heads, although checkpoints
require rotating the first. Here only latents and the indexer's keys are gathered over ranks, and per-head keys and values are never
materialized.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from fuligo.errors import ConfigError
from fuligo.trainer.megatron_backend.core_attention import gather_pieces
from fuligo.trainer.megatron_backend.latent_attention import LatentAttention, SumGradient, latent_attention, new_weight
from fuligo.trainer.megatron_backend.packed import RowSequences
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, SparseLayers
from fuligo.trainer.megatron_backend.sparse_attention import RowPlaces, attend, choose_tokens, row_places

_KEY_NORM_EPSILON = 1e-6
"""Epsilon of the indexer's norm, independent of the epsilon in config.json."""


def sparse_latent_attention(modules: BackendSpecProvider, sparse: SparseLayers, number: int | None) -> ModuleSpec:
    """Return the spec of the attention of layer `number`, counted from 0; None: an MTP layer, which computes a separate choice."""
    dense = latent_attention(modules, norms_apart=True)
    assert isinstance(dense.submodules, MLASelfAttentionSubmodules)
    dense.submodules.core_attention = dense.submodules.linear_kv_up_proj = IdentityOp  # replaced in `SparseLatentAttention`
    source = None if number is None else max(layer for layer in sparse.computing if layer <= number)
    choice = {"source": source, "computes": number == source, "rotary_interleaved": sparse.rotary_interleaved}
    return ModuleSpec(SparseLatentAttention, {**dense.params, "choice": choice}, dense.submodules)


class Indexer(nn.Module):
    """Indexer that scores tokens for `choose_tokens`. Replicated on all TP ranks. Never trained, because a choice has no gradient."""

    def __init__(self, config: MLATransformerConfig, *, rotary_interleaved: bool) -> None:
        super().__init__()
        assert config.dsa_indexer_n_heads is not None and config.dsa_indexer_head_dim is not None
        self.num_heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotary_interleaved = rotary_interleaved
        made: Any = {"dtype": config.params_dtype, "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device()}
        self.linear_wq_b = nn.Linear(config.q_lora_rank, self.num_heads * self.head_dim, bias=False, **made)
        self.linear_wk = nn.Linear(config.hidden_size, self.head_dim, bias=False, **made)
        self.k_norm = nn.LayerNorm(self.head_dim, **made)
        self.linear_weights_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False, **made)

    def forward(self, hidden: Tensor, q_compressed: Tensor, angles: Tensor, mscale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the indexer's queries, head weights and keys.

        Args:
            hidden: [n, E] hidden states.
            q_compressed: [n, q_lora_rank] normalized query latents.
            angles: as in `rotate`.
            mscale: as in `rotate`.

        Returns:
            [n, H, D] queries, [n, H] float32 weights of the heads, and [n, D] keys.
        """
        queries = self.linear_wq_b(q_compressed).unflatten(-1, (self.num_heads, self.head_dim))
        norm = self.k_norm
        keys = F.layer_norm(self.linear_wk(hidden).float(), (self.head_dim,), norm.weight.float(), norm.bias.float(), _KEY_NORM_EPSILON)
        weights = F.linear(hidden.float(), self.linear_weights_proj.weight.float())
        queries, keys = (
            rotate(values, angles, mscale, interleaved=self.rotary_interleaved) for values in (queries, keys.to(hidden.dtype)[:, None])
        )
        return queries, weights, keys.squeeze(1)


class UpProjection(nn.Module):
    """Projection from latents to keys and values of this rank's heads, whose two parts are absorbed into queries and outputs."""

    def __init__(self, config: MLATransformerConfig, num_heads: int) -> None:
        super().__init__()
        self.shape = (num_heads, config.qk_head_dim + config.v_head_dim, config.kv_lora_rank)
        self.key_size = config.qk_head_dim
        self.weight = new_weight(config, self.shape[0] * self.shape[1], config.kv_lora_rank)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the parts for keys [H / tp, key size, kv_lora_rank] and for values [H / tp, value size, kv_lora_rank]."""
        keys, values = self.weight.view(self.shape).tensor_split([self.key_size], dim=1)
        return keys, values


class ChosenAttention(nn.Module):
    """Parameters of the attention to the tokens that this layer, or the nearest layer below with an indexer, has chosen."""

    def __init__(self, config: MLATransformerConfig, *, source: int | None, computes: bool, rotary_interleaved: bool) -> None:
        super().__init__()
        assert config.dsa_indexer_topk is not None
        self.source, self.top_k, self.value_size = source, config.dsa_indexer_topk, config.kv_lora_rank
        self.indexer = Indexer(config, rotary_interleaved=rotary_interleaved) if computes else None


class SparseLatentAttention(LatentAttention):
    """Latent self-attention in which each query attends only to its chosen tokens. `choice`: arguments of `ChosenAttention`."""

    core_attention: ChosenAttention  # pyrefly: ignore[bad-override]

    def __init__(self, config: MLATransformerConfig, *args: Any, choice: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_kv_up_proj = UpProjection(config, self.num_attention_heads_per_partition)
        self.core_attention = ChosenAttention(config, **choice)

    def forward(  # pyrefly: ignore[bad-override]
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: PackedSeqParams, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention.

        Args:
            hidden_states: [L, 1, E] this rank's pieces of every sequence, in order; [L / tp, 1, E] under sequence parallelism.
            attention_mask: None; sequences, causality and choice define the mask.

        Returns:
            The output, of the shape of `hidden_states`, and the bias to add, like Megatron's linear layers.
        """
        assert isinstance(packed_seq_params, RowSequences)
        cp, config = self.pg_collection.cp, self.config
        places = row_places(tuple(packed_seq_params.cu_seqlens_q.tolist()), cp.size(), cp.rank())
        own = self._own(places, len(hidden_states))
        angles, mscale = self._angles(places.longest)
        hidden = hidden_states.squeeze(1)

        q_norm, kv_norm = cast(nn.Module, self.q_layernorm), cast(nn.Module, self.kv_layernorm)
        q_compressed = q_norm(self.linear_q_down_proj(hidden)[0])
        latent, rotary_key = self.linear_kv_down_proj(hidden)[0].split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        rotary_key = rotate(rotary_key[:, None], angles[own.positions], mscale, interleaved=True).squeeze(1)
        latent = self._shared_by_heads(kv_norm(latent))
        latents = self._of_whole_row(torch.cat([latent, rotary_key], dim=-1), places)

        queries = self.linear_q_up_proj(q_compressed)[0].unflatten(-1, (-1, self.q_head_dim))
        plain, rotary = queries.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        rotary = rotate(rotary, angles[places.positions], mscale, interleaved=True)
        keys_up, values_up = self.linear_kv_up_proj()
        queries = torch.cat([torch.einsum("lhd,hdr->lhr", plain, keys_up), rotary], dim=-1)

        chosen = self._chosen(packed_seq_params, hidden, q_compressed, angles[own.positions], mscale, places)
        output = attend(queries, latents, chosen, value_size=self.core_attention.value_size, scale=self.softmax_scale)
        self._forget_when_done(packed_seq_params, output)
        return self.linear_proj(torch.einsum("lhr,hvr->lhv", output, values_up).flatten(1)[:, None])

    @torch.no_grad()
    def _chosen(self, row: RowSequences, hidden: Tensor, q_compressed: Tensor, angles: Tensor, mscale: float, places: RowPlaces) -> Tensor:
        """Return the [L, K] chosen tokens. Under sequence parallelism, each TP rank chooses for its part, and the parts are gathered."""
        core = self.core_attention
        if core.source in row.chosen_tokens:
            return row.chosen_tokens[core.source]
        assert core.indexer is not None, f"layer {core.source} is not in this stage"
        queries, weights, keys = core.indexer(hidden, q_compressed, angles, mscale)
        own = self._own(places, len(hidden))
        chosen = self._over_sequence(choose_tokens(queries, weights, self._of_whole_row(keys, places), own, core.top_k))
        if core.source is not None:
            row.chosen_tokens[core.source] = chosen
        return chosen

    def _forget_when_done(self, row: RowSequences, output: Tensor) -> None:
        """Free a choice when the backward pass reaches its layer, after the layers that reuse it and any recomputation.

        If nothing up to this layer is trained, the choice is kept until the row is freed.
        """
        source = self.core_attention.source
        if self.core_attention.indexer is None or source is None or not output.requires_grad:
            return

        def forget(_: Tensor) -> None:
            row.chosen_tokens.pop(source, None)

        output.register_hook(forget)

    def _own(self, places: RowPlaces, num_tokens: int) -> RowPlaces:
        """Return the positions of the input tokens: all L, or this TP rank's part under sequence parallelism."""
        first = self.tp_group.rank() * num_tokens if self.config.sequence_parallel else 0
        return places.slice(first, first + num_tokens)

    def _angles(self, longest: int) -> tuple[Tensor, float]:
        """Return the [longest, P / 2] rotary angles of each position, and the factor of rotated elements."""
        found = self.rotary_pos_emb(longest, packed_seq=True)
        frequencies, mscale = found if self.config.rope_type == "yarn" else (found, 1.0)
        return frequencies.flatten(1).chunk(2, dim=-1)[0], mscale

    def _shared_by_heads(self, latent: Tensor) -> Tensor:
        """Sum the gradient of the latents over the TP ranks, because each rank's heads contribute a part.

        `LatentAttention` sums the gradient of the rotary key. Under sequence parallelism, gathering the tokens sums both.
        """
        is_whole = self.tp_group.size() > 1 and not self.config.sequence_parallel
        return SumGradient.apply(latent, self.tp_group) if is_whole else latent

    def _over_sequence(self, tokens: Tensor) -> Tensor:
        """Gather [L / tp, ...] -> [L, ...] under sequence parallelism; otherwise return `tokens`."""
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            return gather_from_sequence_parallel_region(tokens, group=self.tp_group)
        return tokens

    def _of_whole_row(self, tokens: Tensor, places: RowPlaces) -> Tensor:
        """Gather all ranks' tokens into [T, ...] in the row's order."""
        group = self.pg_collection.cp
        assert isinstance(group, dist.ProcessGroup)
        tokens = self._over_sequence(tokens)
        if group.size() == 1:
            return tokens
        return gather_pieces(tokens, group).flatten(0, 1).index_select(0, places.in_order.to(tokens.device))


def rotate(values: Tensor, angles: Tensor, mscale: float, *, interleaved: bool) -> Tensor:
    """Apply a rotary embedding (RoFormer, arXiv 2104.09864) to the first P elements of each head, in the data type of the values.

    Args:
        values: [n, H, D]
        angles: [n, P / 2] float32 angles.
        mscale: factor of rotated elements (YaRN).
        interleaved: True: pairs are adjacent elements; False: elements i and i + P / 2. In the result, the first elements of all pairs
            precede the second ones, which does not change products of queries and keys that are both rotated here.
    """
    size = 2 * angles.size(-1)
    rotated, rest = values.tensor_split([size], dim=-1)
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    cos, sin = ((mscale * turn)[:, None].to(values.dtype) for turn in (angles.cos(), angles.sin()))
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def freeze_indexers(model: nn.Module) -> None:
    """Disable the gradients of indexers, which are never trained."""
    for module in model.modules():
        if isinstance(module, Indexer):
            module.requires_grad_(False)


def refuse_unsupported_sparsity(config: TransformerConfig, settings: MegatronTrainerSettings) -> None:
    """Refuse layouts and recomputation that sparse attention does not support.

    Raises ConfigError if a stage starts with a layer that reuses the choice of a layer in the previous stage, or if up projections, which
    sparse attention absorbs, are to be recomputed.
    """
    sparse, layout = settings.sparse_layers, settings.layout
    if sparse is None:
        return
    if "mla_up_proj" in settings.parallel.recompute_modules:
        raise ConfigError(
            "--recompute-modules mla_up_proj: sparse attention does not compute keys and values from latents; remove mla_up_proj"
        )
    for pp_rank in range(layout.pp):
        for vp_stage in range(layout.vpp) if layout.vpp > 1 else [None]:
            first = get_transformer_layer_offset(config, vp_stage, pp_rank)
            if first not in sparse.computing and get_num_layers_to_build(config, vp_stage, pp_rank):
                raise ConfigError(
                    f"--pipeline-model-parallel-size {layout.pp}: a stage starts at layer {first + 1}, which reuses the sparse index of a "
                    "layer in the previous stage; every stage must start at one of the layers "
                    f"{', '.join(str(number + 1) for number in sorted(sparse.computing))}; set --decoder-first-pipeline-num-layers and "
                    "--decoder-last-pipeline-num-layers accordingly"
                )
