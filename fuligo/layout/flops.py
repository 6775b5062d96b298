"""Floating-point operations of a model: two per matrix weight and token, plus attention, which grows with the sequence length."""

from dataclasses import dataclass

from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention

MIN_SAVED_TOKENS = 16
"""Smallest number of tokens that a fork of a prefix tree must save. Otherwise responses whose first tokens agree by chance would split the
tree into many short nodes, each with a separate attention call.
"""


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of one forward pass."""

    per_token: float
    """FLOPs of the layers' matrix products, per token."""
    per_logit: float
    """FLOPs of the head, per token with logits."""
    per_pair: float
    """FLOPs of attention in all layers without a window, per pair of tokens of which one attends to the other."""
    per_index_pair: float
    """FLOPs of sparse attention's indexers, per pair of tokens; 0 without sparse attention."""
    top_k: int | None
    """Maximum number of tokens that a token attends to; None: all tokens up to it."""
    per_window_pair: float = 0.0
    """FLOPs of attention in all layers with a window, per pair of tokens of which one attends to the other."""
    window: int = 0
    """Maximum number of tokens that a token attends to in layers with a window; 0 without such layers."""

    def sequence(self, length: float, square: float, num_logits: float) -> float:
        """Return the mean FLOPs per sequence, given means over the sequences.

        These are length in tokens, squared length (about twice the number of causal attention pairs), and tokens that reach the head.
        """
        pairs = square / 2
        attended = pairs if self.top_k is None else min(pairs, length * self.top_k)
        in_windows = self.per_window_pair * min(pairs, length * self.window)
        in_all = self.per_pair * attended + self.per_index_pair * pairs + in_windows
        return self.per_token * length + self.per_logit * num_logits + in_all

    def whole_sequence(self, length: int) -> float:
        """Return the FLOPs of one sequence with logits for all tokens."""
        return self.sequence(length, square=length * (length + 1), num_logits=length)


def forward_flops(architecture: Architecture) -> ForwardFlops:
    """Return the FLOPs of a forward pass of the model without its MTP layers."""
    index, per_pair, per_window_pair = architecture.sparse_index, 0, 0
    for layer in architecture.layers:
        if layer.is_linear:
            continue
        if layer.window is None:
            per_pair += _per_pair(architecture.attention_of(layer))
        else:
            per_window_pair += _per_pair(architecture.attention_of(layer))
    parts = (*architecture.layer_inputs, *(part for layer in architecture.layers for part in layer.parts))
    num_indexers = sum(layer.computes_index for layer in architecture.layers)
    # Each token of linear attention reads the state twice and changes it once.
    linear = architecture.linear_attention
    states = 6.0 * linear.state_elements * architecture.num_linear_layers if linear else 0.0
    return ForwardFlops(
        per_token=2.0 * sum(architecture.active(part) for part in parts if part.is_matmul) + states,
        per_logit=2.0 * architecture.vocab_size * architecture.hidden_size,
        per_pair=float(per_pair),
        per_index_pair=2.0 * index.num_heads * index.head_dim * num_indexers if index else 0.0,
        top_k=index.top_k if index else None,
        per_window_pair=float(per_window_pair),
        window=max((layer.window or 0 for layer in architecture.layers), default=0),
    )


def _per_pair(attention: GroupedAttention | LatentAttention) -> int:
    """Return the attention FLOPs of one layer per pair of tokens of which one attends to the other."""
    if isinstance(attention, GroupedAttention):
        return 4 * attention.num_heads * attention.head_dim
    return 2 * attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim)
