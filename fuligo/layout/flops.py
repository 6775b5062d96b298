"""Floating-point operations of the model: two for every matrix weight and token, and those of attention, which grow with length."""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.models.architecture import Architecture, GroupedAttention, Part


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Of one forward pass."""

    per_token: float
    """Matrix products of the layers."""
    per_logit: float
    """The head, for each token whose probability is wanted."""
    per_pair: float
    """Attention of all layers, for each pair of tokens of which one sees the other."""
    per_index_pair: float
    """The indexers of sparse attention, likewise; 0 without."""
    top_k: int | None
    """Tokens that a token attends to at most; None: all before it."""

    def sequence(self, length: float, square: float, num_logits: float) -> float:
        """Of an average sequence.

        Args:
            length: mean length in tokens.
            square: mean of the squared length: about twice the pairs of causal attention.
            num_logits: tokens that reach the head.
        """
        pairs = square / 2
        attended = pairs if self.top_k is None else min(pairs, length * self.top_k)
        return self.per_token * length + self.per_logit * num_logits + self.per_pair * attended + self.per_index_pair * pairs

    def whole_sequence(self, length: int) -> float:
        """Of one sequence all of whose tokens reach the head."""
        return self.sequence(length, square=length * (length + 1), num_logits=length)


def forward_flops(architecture: Architecture) -> ForwardFlops:
    """What a forward pass of the model costs, layers for multi-token prediction apart."""
    attention, index = architecture.attention, architecture.sparse_index
    if isinstance(attention, GroupedAttention):
        per_layer = 4 * attention.num_heads * attention.head_dim
    else:
        per_layer = 2 * attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim)
    num_indexers = sum(layer.computes_index for layer in architecture.layers)
    return ForwardFlops(
        per_token=2.0 * sum(_matmul(architecture, part) for layer in architecture.layers for part in layer.parts),
        per_logit=2.0 * architecture.vocab_size * architecture.hidden_size,
        per_pair=float(per_layer * architecture.num_layers),
        per_index_pair=2.0 * index.num_heads * index.head_dim * num_indexers if index else 0.0,
        top_k=index.top_k if index else None,
    )


def _matmul(architecture: Architecture, part: Part) -> int:
    return architecture.active(part) if part.is_matmul else 0
