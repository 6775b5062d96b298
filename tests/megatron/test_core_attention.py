"""Attention over packed rows against torch's attention over each sequence."""

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fuligo.trainer.ranks.world import World
from tests.megatron.ranks import RankPool

LENGTHS = (8, 4, 12, 4, 24)
"""Sequence lengths, each a multiple of 2 * cp."""


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute attention with torch. [T, H, D], [T, Hkv, D], [T, Hkv, Dv] -> [T, H * Dv]"""
    outputs = []
    for start, end in pairwise(accumulate(LENGTHS, initial=0)):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def largest_differences(world: World, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, scale: float | None) -> list[float]:
    """Return the largest differences of this rank's output and of the gradients of queries, keys and values."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from fuligo.trainer.megatron_backend.core_attention import PackedCoreAttention, zigzag
    from fuligo.trainer.megatron_backend.cpu import run_on_cpu

    run_on_cpu()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=num_heads, attention_dropout=0.0)
    groups = SimpleNamespace(cp=dist.group.WORLD)
    attention = PackedCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups, softmax_scale=scale)
    torch.manual_seed(0)  # all ranks have the same row
    shapes = [(num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim)]
    whole = [torch.randn(sum(LENGTHS), *shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(sum(LENGTHS), num_heads * value_dim)
    reference = expected(*whole, scale=scale or key_dim**-0.5)
    (reference * weight).sum().backward()

    starts = accumulate(LENGTHS, initial=0)
    mine = torch.cat([zigzag(length, world.size)[world.rank] + start for length, start in zip(LENGTHS, starts)])
    own = [x.detach()[mine].requires_grad_() for x in whole]
    cu_seqlens = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    output = attention(*own, None, packed_seq_params=PackedSeqParams(cu_seqlens_q=cu_seqlens))
    (output * weight[mine]).sum().backward()
    compared = [(output, reference[mine]), *((x.grad, y.grad[mine]) for x, y in zip(own, whole))]
    return [float((got - wanted).abs().max()) for got, wanted in compared]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "key_dim", "value_dim", "scale"),
    [(4, 2, 16, 16, None), (4, 4, 24, 16, 0.3)],
    ids=["grouped heads", "keys longer than values"],
)
def test_output_and_gradients_are_those_of_separate_sequences(pool: RankPool, cp, num_heads, num_kv_heads, key_dim, value_dim, scale):
    for differences in pool.run(cp, largest_differences, num_heads, num_kv_heads, key_dim, value_dim, scale):
        assert max(differences) < 5e-6
