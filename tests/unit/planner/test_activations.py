"""Bytes that a layer keeps for its backward pass, against tensors saved by autograd."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.layout.adapter import AdapterShape
from fuligo.layout.megatron import Layout, layout_of
from fuligo.models.architecture import Architecture, GroupedAttention
from fuligo.planner.memory.activations import chunks_in_flight, layer_bytes, logits_bytes
from tests.unit.planner.subjects import facts, subject_of

TOKENS = 64
RANK = 8


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    """Make tensors that have sizes alone, so that nothing is computed."""
    with torch.device("meta"):
        yield


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.float().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype)


class Attention(torch.autograd.Function):
    """Flash attention keeps its inputs, its output and the log-sum-exp of each head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.clone()
        ctx.save_for_backward(query, key, value, output, torch.zeros(query.shape[:2]))
        return output


class SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def saved_bytes(architecture: Architecture, *, head_norms: bool, output_norms: bool, adapted: Sequence[str] | None = None) -> int:
    """Return the bytes saved by autograd for a dense layer with the fused operations of Megatron and TransformerEngine.

    Args:
        adapted: matrices with an adapter of rank `RANK`; all weights are then frozen.
    """
    attention, hidden, width = architecture.attention, architecture.hidden_size, architecture.intermediate_size
    assert isinstance(attention, GroupedAttention)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.bfloat16, requires_grad=adapted is None)

    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    weights = [
        weight(hidden, (heads + 2 * kv_heads) * size),
        weight(heads * size, hidden),
        weight(hidden, 2 * width),
        weight(width, hidden),
    ]
    factors: list[Tensor] = []

    def product(x: Tensor, number: int, *matrices: str) -> Tensor:
        """Return the product of a layer that joins matrices, with the updates of the adapted ones, as `LinearAdapter` computes them."""
        names = [name for name in matrices if name in (adapted or ())]
        if not names:
            return x @ weights[number]
        joined = torch.zeros(weights[number].shape[0], RANK * len(names), dtype=torch.bfloat16, requires_grad=True)
        last = torch.zeros(RANK, weights[number].shape[1], dtype=torch.bfloat16, requires_grad=True)
        ours.update(tensor.untyped_storage()._cdata for tensor in (joined, last))
        factors.extend((joined, last))  # so that no other tensor gets their memory
        parts = ((x @ joined) * 2.0).split(RANK, -1)
        update = torch.stack([part @ last for part in parts]).sum(0)
        return x @ weights[number] + update

    ours = {tensor.untyped_storage()._cdata for tensor in weights}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    x = torch.randn(TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        qkv = product(Norm.apply(x), 0, "q_proj", "k_proj", "v_proj")
        query, key, value = (
            part.contiguous().view(TOKENS, -1, size) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)
        )
        if head_norms:
            query, key = Norm.apply(query), Norm.apply(key)
        attended = product(Attention.apply(query, key, value).view(TOKENS, -1), 1, "o_proj")
        x = x + (Norm.apply(attended) if output_norms else attended)
        computed = product(SwiGlu.apply(product(Norm.apply(x), 2, "gate_proj", "up_proj")), 3, "down_proj")
        x = x + (Norm.apply(computed) if output_norms else computed)
    return sum(saved.values())


@pytest.mark.parametrize(
    "model, head_norms, output_norms", [("qwen3-4b", True, False), ("glm4-9b", False, True), ("mimo-7b", False, False)]
)
def test_a_dense_layer_keeps_what_autograd_saves(model: str, head_norms: bool, output_norms: bool) -> None:
    architecture = facts(model)
    subject = subject_of("--actor-num-gpus-per-node 1 --tensor-model-parallel-size 1 --train-backend megatron", model)
    ours = layer_bytes(architecture.layers[0], architecture, layout_of(subject.config), subject.config)
    assert ours.whole * TOKENS == pytest.approx(saved_bytes(architecture, head_norms=head_norms, output_norms=output_norms), rel=1e-3)
    assert ours.stored == ours.whole
    assert ours.entry == 2 * architecture.hidden_size


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("down_proj",), ("up_proj", "o_proj")])
@pytest.mark.parametrize("model, head_norms, output_norms", [("qwen3-4b", True, False), ("mimo-7b", False, False)])
def test_a_frozen_layer_with_an_adapter_keeps_what_autograd_saves(
    model: str, head_norms: bool, output_norms: bool, targets: tuple[str, ...]
) -> None:
    architecture = facts(model)
    config = subject_of("--actor-num-gpus-per-node 1 --train-backend megatron", model).config
    adapter = AdapterShape(AdapterConfig(RANK, 16.0, targets), architecture)
    ours = layer_bytes(architecture.layers[0], architecture, layout_of(config), config, adapter)
    saved = saved_bytes(architecture, head_norms=head_norms, output_norms=output_norms, adapted=targets or adapter.names)
    assert ours.whole * TOKENS == pytest.approx(saved, rel=1e-3)


def test_tensor_parallel_ranks_share_everything_under_sequence_parallelism() -> None:
    flags = "--actor-num-gpus-per-node 8 --tensor-model-parallel-size"
    one, two = (subject_of(f"{flags} {more}", "qwen3-4b") for more in ("1 --train-backend megatron", "2 --sequence-parallel"))
    whole, half = (layer_bytes(s.architecture.layers[0], s.architecture, layout_of(s.config), s.config).whole for s in (one, two))
    assert half == pytest.approx(whole / 2)


def test_experts_see_copies_of_tokens() -> None:
    subject = subject_of("--actor-num-gpus-per-node 8 --expert-model-parallel-size 8", "glm4.7-flash")
    architecture, shape = subject.architecture, layout_of(subject.config)
    dense, sparse = (layer_bytes(architecture.layers[number], architecture, shape, subject.config) for number in (0, 1))
    routed = 4 * 2 * (2048 + 3 * 1536)
    shared, router = 3 * 2 * 1536, 2 * 4 * 64
    assert sparse.whole - dense.whole == routed + shared + router - 3 * 2 * 10240


def test_the_allgather_dispatcher_brings_every_token_to_every_rank() -> None:
    flags = "--actor-num-gpus-per-node 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type"
    gathered, exchanged = (subject_of(f"{flags} {name}", "glm4.7-flash") for name in ("allgather", "alltoall"))
    layer, shape = gathered.architecture.layers[1], layout_of(gathered.config)
    more, less = (layer_bytes(layer, subject.architecture, shape, subject.config) for subject in (gathered, exchanged))
    assert more.passing - less.passing == 2 * 2 * 2048 * 8
    assert more.whole == less.whole


def shape_with(pp: int, vpp: int = 1) -> Layout:
    return Layout(num_ranks=pp, pp=pp, vpp=vpp)


@pytest.mark.parametrize("rank, expected", [(0, 4), (1, 3), (3, 1)])
def test_earlier_stages_have_more_micro_batches_in_flight(rank: int, expected: int) -> None:
    assert chunks_in_flight(shape_with(4), rank, 16) == expected


def test_no_more_are_in_flight_than_there_are() -> None:
    assert chunks_in_flight(shape_with(8), 0, 2) == 2
    assert chunks_in_flight(shape_with(1), 0, 9) == 1


def test_interleaving_costs_memory() -> None:
    # (2 x (4 - 0 - 1) + (2 - 1) x 4) warm-up passes of half a stage each, and the one at work
    assert chunks_in_flight(shape_with(4, vpp=2), 0, 16) == 11


def test_logits_are_a_share_of_the_vocabulary() -> None:
    subject = subject_of("--actor-num-gpus-per-node 8 --tensor-model-parallel-size 8 --sequence-parallel", "glm4-9b")
    assert logits_bytes(subject.architecture, layout_of(subject.config), 1024) == 8 * 1024 * 151552 // 8
