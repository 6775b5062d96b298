"""Routers of mixture-of-experts layers over packed rows: only real tokens count toward the balance of the experts, and a token that samples
share counts once for each of them.

Megatron-Core 0.16.1 (transformer/moe/router.py) chooses the experts. Its balancing is replaced: its auxiliary losses treat a packed row as
one sequence and are scaled for gradients that are divided by the number of tokens, which ours are not; its count of tokens for each
expert fails with a padding mask, and becomes bfloat16 with the model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from fuligo.errors import ConfigError
from fuligo.trainer.megatron_backend.packed import PackedRow

_FLOAT32_BUFFERS = ("expert_bias", "local_tokens_per_expert")


class PackedRouter(TopKRouter):
    """Router that chooses the experts of each token, and balances them over the real tokens of packed rows.

    It takes the mask of `padding_mask`, which Megatron's layer transposes. Auxiliary losses (Switch Transformer, arXiv
    2101.03961; sequence by sequence: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20) are means over the tokens of the optimizer step,
    so each row, or sequence, weighs as much as it has tokens.
    """

    tokens_of_step: float = 1.0
    """Real tokens of the optimizer step, over all ranks and micro-batches that count."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.balance_loss = torch.zeros(())
        """This rank's part of the auxiliary losses since `take_balance_loss`, before division by `--moe-aux-loss-coeff`."""
        self._outside: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and choice, `[tokens, experts]` each, for an input [tokens, 1, E].

        The mask [tokens, S] is True if the token is not of the sequence; None: all tokens are of one sequence.
        """
        # Only during the call: recomputation calls again with the same mask, after other rows.
        self._outside = padding_mask
        try:
            return super().forward(input)
        finally:
            self._outside = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts as Megatron does; then attach the auxiliary losses to the weights' gradient."""
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
        """Return None, so that Megatron adds no auxiliary loss besides that of `routing`."""
        return 0.0

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, but not in the first pass of recomputed layers nor while scoring."""
        if self.local_tokens_per_expert is not None and torch.is_grad_enabled():
            real = self._members(len(routing_map), by_sequence=False)
            self.local_tokens_per_expert += (real.to(torch.float32) @ routing_map.to(torch.float32))[0]

    def _members(self, num_tokens: int, *, by_sequence: bool) -> Tensor:
        """Return [S or 1, tokens]: how often each token is in each sequence, or in all; more than once if sequences share it."""
        if self._outside is None:
            return torch.ones(1, num_tokens, dtype=torch.bool, device=self.weight.device)
        inside = ~self._outside.t()
        return inside if by_sequence else inside.sum(0, keepdim=True)

    def _balance_loss(self, logits: Tensor, members: Tensor) -> Tensor:
        """Return this rank's part of sum_s n_s / n_step * E / (k * n_s^2) * sum_e count_se * score_se, over the groups s of `members`.

        Counts and n_s are summed over the ranks that share the row; scores cover only this rank's tokens.
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
        """Leave the bias and the counts in float32 when the model is converted."""
        kept = {name: getattr(self, name) for name in _FLOAT32_BUFFERS if getattr(self, name, None) is not None}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self


def padding_mask(row: PackedRow, config: TransformerConfig, tp_group: dist.ProcessGroup) -> Tensor | None:
    """Return [S, L] bool, or [S, L / tp] of this TP rank's tokens under sequence parallelism: True if a token is not of the sequence.

    S is 1, for all sequences, if no loss distinguishes them and they share no token. None for a model without experts.
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
    """Reset the experts' token counts before an optimizer step, and divide its auxiliary losses by `num_tokens`."""
    for router in routers(chunks):
        router.tokens_of_step = float(num_tokens)
        if router.local_tokens_per_expert is not None:
            router.local_tokens_per_expert.zero_()


@torch.no_grad()
def move_corrections(chunks: Sequence[nn.Module]) -> None:
    """Move the correction of each expert's scores after an optimizer step. A collective.

    It goes up by `--moe-router-bias-update-rate` if the expert had fewer tokens than the mean, down if it had more (arXiv 2408.15664).
    Megatron does so as soon as it has summed the gradients, before it is known whether they are finite; `wrap` prevents that.
    """
    rate = get_model_config(chunks[0]).moe_router_bias_update_rate
    corrected = [router for router in routers(chunks) if router.expert_bias is not None] if rate else []
    if corrected:
        counts = torch.stack([cast(Tensor, router.local_tokens_per_expert) for router in corrected])
        moved = get_updated_expert_bias(counts, torch.stack([cast(Tensor, router.expert_bias) for router in corrected]), rate)
        for router, correction in zip(corrected, moved, strict=True):
            cast(Tensor, router.expert_bias).copy_(correction)


def take_balance_loss(chunks: Iterable[nn.Module]) -> Tensor | None:
    """Return a scalar: this data-parallel replica's part of the auxiliary losses since the last call. None without any. A collective.

    The replicas' parts add up to the step's losses.
    """
    chunks = list(chunks)
    if not has_balance_loss(get_model_config(chunks[0])):
        return None
    total = torch.zeros((), device=next(chunks[0].parameters()).device)
    for router in routers(chunks):
        total += router.balance_loss
        router.balance_loss = torch.zeros(())
    for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
        dist.all_reduce(total, group=cast(dist.ProcessGroup, group))
    return total


def has_balance_loss(config: TransformerConfig) -> bool:
    """Return whether some layer of the model has an auxiliary loss, maybe on another pipeline stage."""
    coefficients = config.moe_aux_loss_coeff
    return config.num_moe_experts is not None and any(coefficients if isinstance(coefficients, list) else [coefficients])


def refuse_unsupported_routing(config: TransformerConfig) -> None:
    """Refuse settings that would make the loss depend on packing, or the routing differ from that of the served model.

    Raises ConfigError if a setting is unsupported, naming it and what to use.
    """
    if config.num_moe_experts is None:
        return
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"--tensor-model-parallel-size {config.tensor_model_parallel_size} needs --sequence-parallel: the model has experts, and "
            "Megatron-Core trains them in no other way"
        )
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("none", "aux_loss", "seq_aux_loss"):
            raise ConfigError(
                f"--moe-router-load-balancing-type {kind}: rows of packed samples can be balanced by aux_loss, seq_aux_loss, "
                "the expert bias (--moe-router-bias-update-rate) or not at all (none)"
            )
    refused = {
        "--moe-expert-capacity-factor": (config.moe_expert_capacity_factor, "a token's experts would depend on its neighbors in the row"),
        "--moe-input-jitter-eps": (config.moe_input_jitter_eps, "log-probabilities would depend on chance"),
        "--moe-router-force-load-balancing": (config.moe_router_force_load_balancing, "log-probabilities would depend on chance"),
        "--moe-z-loss-coeff": (config.moe_z_loss_coeff, "Megatron scales it for gradients that are divided by the number of tokens"),
    }
    for flag, (value, reason) in refused.items():
        if value:
            raise ConfigError(f"{flag} {value}: {reason}; remove it")
    is_balanced = has_balance_loss(config) or (config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate)
    if config.recompute_method == "block" and is_balanced:
        raise ConfigError(
            "--recompute-method block with balanced experts: Megatron passes the padding mask only to recomputed layers; use uniform"
        )
    # Groups, and the weight of a single expert, are those of the served model only in these cases.
    top_k, groups, top_groups = config.moe_router_topk, config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    if groups > 1 and top_k // top_groups != 2:
        raise ConfigError(
            f"num_experts_per_tok {top_k} with topk_group {top_groups}: Megatron ranks groups by their best {top_k // top_groups} experts, "
            "but the model by its best 2; only num_experts_per_tok = 2 * topk_group agrees"
        )
    if top_k == 1 and config.moe_router_score_function == "sigmoid":
        raise ConfigError(
            "num_experts_per_tok 1 with sigmoid scores: Megatron does not normalize the weight of a single expert, but the model does"
        )
