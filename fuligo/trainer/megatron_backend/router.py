"""Routers of mixture-of-experts layers over packed rows.

Only real tokens count toward the balance of the experts, and a token that k samples share counts k times.

Megatron-Core 0.16.1 (transformer/moe/router.py) chooses the experts, but its balancing is replaced. Its auxiliary losses treat a packed row
as one sequence and are scaled for gradients that are divided by the number of tokens, which is not done here. Its count of tokens per
expert fails with a padding mask, and is cast to bfloat16 with the model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from fuligo.errors import ConfigError
from fuligo.quantities import count
from fuligo.trainer.megatron_backend.packed import PackedRow
from fuligo.trainer.megatron_backend.weights.local import rank_groups

_FLOAT32_BUFFERS = ("expert_bias", "local_tokens_per_expert")


class PackedRouter(TopKRouter):
    """Router that chooses the experts of each token, and balances them over the real tokens of packed rows.

    Its mask is the result of `padding_mask`, transposed by Megatron's layer. The auxiliary losses (Switch Transformer, arXiv 2101.03961;
    per sequence: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20) are means over the tokens of the optimizer step, so each row or
    sequence is weighted by its number of tokens.
    """

    tokens_of_step: float = 1.0
    """Number of real tokens in the optimizer step, over all ranks and without repeated micro-batches."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.balance_loss = torch.zeros(())
        """This rank's part of the auxiliary losses since the last `take_balance_loss`, multiplied by `--moe-aux-loss-coeff`."""
        self._outside: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the choice of experts, [tokens, experts] each, for an input [tokens, 1, E].

        `padding_mask`: [tokens, S], True if the token does not belong to the sequence; None: all tokens belong to one sequence.
        """
        # Set only during the call, because other rows may run before recomputation calls again with the same mask.
        self._outside = padding_mask
        try:
            return super().forward(input)
        finally:
            self._outside = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts like Megatron, and attach the auxiliary losses to the gradient of the weights."""
        probs, routing_map = super().routing(logits)
        if self.training and torch.is_grad_enabled():
            for kind in ("aux_loss", "seq_aux_loss"):
                if coefficient := super().get_aux_loss_coeff(kind):
                    members = self._members(len(probs), by_sequence=kind == "seq_aux_loss")
                    loss = coefficient * self._balance_loss(logits.flatten(0, 1), members)
                    self.balance_loss = self.balance_loss + loss.detach()
                    probs = MoEAuxLossAutoScaler.apply(probs, loss)
        return probs, routing_map

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return 0, so that Megatron adds no auxiliary loss in addition to that of `routing`."""
        return 0.0

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Count the tokens of each expert in passes with gradients: not while scoring, and only once in recomputed layers."""
        if self.local_tokens_per_expert is not None and torch.is_grad_enabled():
            real = self._members(len(routing_map), by_sequence=False)
            self.local_tokens_per_expert += (real.to(torch.float32) @ routing_map.to(torch.float32))[0]

    def _members(self, num_tokens: int, *, by_sequence: bool) -> Tensor:
        """Return how often each token occurs: [S, tokens] in each sequence, or [1, tokens] in all, more than once if sequences share it."""
        if self._outside is None:
            return torch.ones(1, num_tokens, dtype=torch.bool, device=self.weight.device)
        inside = ~self._outside.t()
        return inside if by_sequence else inside.sum(0, keepdim=True)

    def _balance_loss(self, logits: Tensor, members: Tensor) -> Tensor:
        """Return this rank's part of sum_s n_s / n_step * E / (k * n_s^2) * sum_e count_se * score_se.

        s: a row of `members` (one sequence, or all); e: one of E experts, of which each token takes k; n_s and n_step: tokens of s and of
        the step; count_se: tokens of s that took e; score_se: sum of their scores for e. Counts and n_s are summed over the ranks that
        share the row; scores cover only this rank's tokens.

        Args:
            logits: [tokens, E] router's logits.
            members: [S, tokens] as `_members` returns them.
        """
        chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        weights = members.to(scores.dtype)
        with torch.no_grad():
            counts = torch.cat([weights @ chosen.to(scores.dtype), weights.sum(1, keepdim=True)], dim=1)
            dist.all_reduce(counts, group=self.tp_cp_group)
        num_tokens = counts[:, -1].clamp(min=1)
        per_group = (counts[:, :-1] * (weights @ scores)).sum(1) / num_tokens
        return per_group.sum() * (logits.size(-1) / (self.topk * self.tokens_of_step))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the expert bias and the token counts in float32 when the model is cast."""
        kept = {name: getattr(self, name) for name in _FLOAT32_BUFFERS if getattr(self, name, None) is not None}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self


def padding_mask(row: PackedRow, config: TransformerConfig, tp_group: dist.ProcessGroup) -> Tensor | None:
    """Return the [S, L] bool mask (under sequence parallelism [S, L / tp]) that is True if a token does not belong to the sequence.

    S is 1, one entry for all sequences, if no loss distinguishes them and they share no token. None for a model without experts.
    """
    if config.num_moe_experts is None:
        return None
    num_ranks = tp_group.size() if config.sequence_parallel else 1
    if row.members is not None:
        return ~row.members.chunk(num_ranks, dim=1)[tp_group.rank() % num_ranks]
    ids = row.sequence_ids.chunk(num_ranks)[tp_group.rank() % num_ranks]
    if "seq_aux_loss" not in config.moe_router_load_balancing_type:
        return (ids < 0)[None]
    num_sequences = row.packed_seq_params.cu_seqlens_q.numel() - 1
    return ids[None] != torch.arange(num_sequences, device=ids.device)[:, None]


def routers(chunks: Iterable[nn.Module]) -> Iterator[PackedRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, PackedRouter))


def begin_step(chunks: Iterable[nn.Module], num_tokens: int) -> None:
    """Prepare the routers for an optimizer step: reset the token counts, and set the number of tokens that divides auxiliary losses."""
    for router in routers(chunks):
        router.tokens_of_step = float(num_tokens)
        if router.local_tokens_per_expert is not None:
            router.local_tokens_per_expert.zero_()


@torch.no_grad()
def move_corrections(chunks: Sequence[nn.Module]) -> None:
    """Update the expert bias of each router after an optimizer step. A collective.

    The bias of an expert increases by `--moe-router-bias-update-rate` if it had fewer tokens than the mean, and decreases if it had more
    (arXiv 2408.15664). Megatron would do this when gradients are summed, before they are known to be finite; `wrap` prevents that.
    """
    rate = get_model_config(chunks[0]).moe_router_bias_update_rate
    corrected = [router for router in routers(chunks) if router.expert_bias is not None] if rate else []
    if corrected:
        counts = torch.stack([cast(Tensor, router.local_tokens_per_expert) for router in corrected])
        moved = get_updated_expert_bias(counts, torch.stack([cast(Tensor, router.expert_bias) for router in corrected]), rate)
        for router, correction in zip(corrected, moved, strict=True):
            cast(Tensor, router.expert_bias).copy_(correction)


def take_balance_loss(chunks: Iterable[nn.Module]) -> Tensor | None:
    """Return this data-parallel replica's part of the auxiliary losses since the last call, a scalar, and reset it. A collective.

    The sum over replicas is the step's auxiliary loss. None if the model has no auxiliary loss.
    """
    chunks = list(chunks)
    if not has_balance_loss(get_model_config(chunks[0])):
        return None
    total = torch.zeros((), device=next(chunks[0].parameters()).device)
    for router in routers(chunks):
        total += router.balance_loss
        router.balance_loss = torch.zeros(())
    groups = rank_groups()
    for group in (groups.model, groups.context):
        dist.all_reduce(total, group=group)
    return total


def has_balance_loss(config: TransformerConfig) -> bool:
    """Return whether the model has an auxiliary loss, possibly only on other pipeline stages."""
    coefficients = config.moe_aux_loss_coeff
    return config.num_moe_experts is not None and any(coefficients if isinstance(coefficients, list) else [coefficients])


def refuse_unsupported_routing(config: TransformerConfig) -> None:
    """Refuse settings that would make the loss depend on packing, or the routing differ from that of the served model.

    Raises ConfigError for an unsupported setting; the message says what to use instead.
    """
    if config.num_moe_experts is None:
        return
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"--tensor-model-parallel-size {config.tensor_model_parallel_size} needs --sequence-parallel: Megatron-Core trains experts "
            "under tensor parallelism only with it"
        )
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("none", "aux_loss", "seq_aux_loss"):
            raise ConfigError(
                f"--moe-router-load-balancing-type {kind} is not supported for packed samples; use aux_loss, seq_aux_loss or none, or "
                "balance by the expert bias (--moe-router-bias-update-rate)"
            )
    refused = {
        "--moe-expert-capacity-factor": (config.moe_expert_capacity_factor, "a token's experts would depend on its neighbors in the row"),
        "--moe-input-jitter-eps": (config.moe_input_jitter_eps, "log-probabilities would depend on chance"),
        "--moe-router-force-load-balancing": (config.moe_router_force_load_balancing, "log-probabilities would depend on chance"),
        "--moe-z-loss-coeff": (
            config.moe_z_loss_coeff,
            "Megatron scales it for gradients that it divides by the number of tokens, which fuligo does not do",
        ),
    }
    for flag, (value, reason) in refused.items():
        if value:
            raise ConfigError(f"{flag} {value}: {reason}; remove it")
    is_balanced = has_balance_loss(config) or (config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate)
    if config.recompute_method == "block" and is_balanced:
        raise ConfigError(
            "cannot use --recompute-method block with balanced experts: Megatron passes the padding mask only to recomputed layers; use "
            "--recompute-method uniform"
        )
    # Megatron ranks expert groups, and normalizes the weight of a single expert, like the served model only in some cases.
    top_k, groups, top_groups = config.moe_router_topk, config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    if groups > 1 and top_k // top_groups != 2:
        raise ConfigError(
            f"cannot train num_experts_per_tok {top_k} with topk_group {top_groups}: Megatron ranks groups by their best "
            f"{count(top_k // top_groups, 'expert')}, but the model by their best 2; choose a model with "
            "num_experts_per_tok = 2 * topk_group"
        )
    if top_k == 1 and config.moe_router_score_function == "sigmoid":
        raise ConfigError(
            "cannot train num_experts_per_tok 1 with sigmoid scores: Megatron does not normalize the weight of a single expert, but the "
            "model does; choose another model"
        )
