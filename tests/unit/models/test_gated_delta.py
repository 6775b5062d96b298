"""Gated delta-rule layers on packed sequences against transformers' own, one sequence at a time."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from fuligo.models import gated_delta
from fuligo.models.attention import unpackable_layers
from fuligo.models.gated_delta import (
    gated_delta_modules,
    pack_gated_delta,
    packed_convolution,
    packed_rule,
    sequence_arguments,
    sequence_ids,
)
from tests import tiny

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def starts_of(lengths: list[int]) -> tuple[int, ...]:
    return (0, *torch.tensor(lengths).cumsum(0).tolist())


@given(LENGTHS, st.integers(1, 5))
def test_the_convolution_sees_its_own_sequence_only(lengths: list[int], taps: int) -> None:
    cu_seqlens = starts_of(lengths)
    generator = torch.Generator().manual_seed(len(lengths))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 3, cu_seqlens[-1]), (3, taps), (3,)))
    packed = packed_convolution(x, weight, bias, "silu", sequence_ids(cu_seqlens, CPU))
    alone = [packed_convolution(x[..., start:end], weight, bias, "silu") for start, end in pairwise(cu_seqlens)]
    torch.testing.assert_close(packed, torch.cat(alone, -1))


@given(LENGTHS)
def test_the_state_of_a_sequence_begins_at_zero(lengths: list[int]) -> None:
    cu_seqlens = starts_of([*lengths, 70])  # longer than a chunk of the rule
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value, g, beta = (torch.randn(1, cu_seqlens[-1], 2, *rest, generator=generator) for rest in ((4,), (4,), (6,), (), ()))
    given = {"g": -g.abs() / 10, "beta": beta.sigmoid()}
    out, states = packed_rule(
        torch_chunk_gated_delta_rule,
        query, key, value, **given,
        cu_seqlens=torch.tensor(cu_seqlens), output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert states is not None
    for number, (start, end) in enumerate(pairwise(cu_seqlens)):
        own = {name: x[:, start:end] for name, x in given.items()}
        alone, state = torch_chunk_gated_delta_rule(
            query[:, start:end], key[:, start:end], value[:, start:end], **own, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(out[:, start:end], alone)
        torch.testing.assert_close(states[number], state[0])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_no_gradient_flows_from_one_sequence_to_another(family: str) -> None:
    model = tiny.model(family, layers=1, layer_types=["linear_attention"])
    assert pack_gated_delta(model) == 1
    cu_seqlens = (0, 7, 12)
    embedded = torch.randn(1, 12, 64, requires_grad=True)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    out: Tensor = model.model(
        inputs_embeds=embedded, position_ids=positions, use_cache=False, **sequence_arguments(cu_seqlens, CPU)
    ).last_hidden_state
    out[0, 7:].square().sum().backward()
    assert embedded.grad is not None
    assert not embedded.grad[0, :7].any()
    assert embedded.grad[0, 7:].abs().sum(-1).all()


class OfAnotherPackage(nn.Module):
    """Stand-in for a norm of flash-linear-attention, whose kernel refuses tensors of a CPU."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_kernels_are_not_given_what_is_on_a_cpu(family: str) -> None:
    """The trainer checks a model on the CPU before it places it."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("cpu tensor?")

    model = tiny.model(family, layers=1, layer_types=["linear_attention"])
    tokens = torch.arange(9)[None]
    [module] = gated_delta_modules(model)
    with torch.no_grad():
        module.norm.weight.uniform_()
        expected = model(tokens, use_cache=False).logits
    module.chunk_gated_delta_rule = module.causal_conv1d_fn = refuse
    module.norm = OfAnotherPackage(module.norm.weight)
    pack_gated_delta(model)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize(
    "triton, capability, tilelang, remedy",
    [
        ("3.6.0", (9, 0), False, "with Triton 3.6.0 on Hopper GPUs; pip install tilelang"),
        ("3.6.0", (9, 0), True, None),
        ("3.6.0", (10, 0), False, None),
        ("3.3.1", (9, 0), False, None),
        ("3.7.0", (9, 0), False, "with Triton 3.7.0 on Hopper GPUs; pip install tilelang"),
        ("3.7.1", (9, 0), False, None),
    ],
)
def test_kernels_with_wrong_gradients_are_used_only_with_tilelang(
    monkeypatch: pytest.MonkeyPatch, triton: str, capability: tuple[int, int], tilelang: bool, remedy: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(gated_delta, "find_spec", {"tilelang": tilelang or None}.get)
    reason = gated_delta._lacks_kernels(SimpleNamespace(chunk_gated_delta_rule=SimpleNamespace(__module__="fla.ops")))
    assert (reason or "").endswith(remedy or "") and (reason is None) == (remedy is None)


def test_other_layers_of_that_name_are_unknown() -> None:
    assert unpackable_layers(tiny.model_config("qwen3_next")) == []
    other = tiny.model_config("qwen3", layers=1)
    other.layer_types = ["linear_attention"]
    assert unpackable_layers(other) == ["linear_attention"]
    assert unpackable_layers(OlmoHybridConfig(num_hidden_layers=4)) == ["linear_attention"]
