"""Products by oneDNN equal those by MKL, forward and backward, and other processors keep MKL."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuligo.models import cpu_products
from fuligo.models.cpu_products import onednn_is_faster, product, speed_up_linear_layers
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("shape", [(40, 24), (2, 33, 24), (1, 3, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 50, bias=bias)
    x, upstream = torch.randn(shape), torch.randn(*shape[:-1], 50)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = layer(theirs)
    expected.backward(upstream)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    assert speed_up_linear_layers(layer) == 1
    out = layer(ours)
    out.backward(upstream)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_passes_the_gradient_of_its_input_on() -> None:
    layer = nn.Linear(24, 50).requires_grad_(False)
    speed_up_linear_layers(layer)
    x = torch.randn(64, 24, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(64, 24), rtol=1e-5, atol=1e-5)
    assert layer.weight.grad is None


@pytest.mark.parametrize("num_rows", [1, 200])
def test_products_take_any_strides(num_rows: int) -> None:
    left, right = torch.randn(30, num_rows).t(), torch.randn(30, 70).t()
    torch.testing.assert_close(product(left, right), left.contiguous() @ right.contiguous().t(), rtol=1e-5, atol=1e-5)


def test_a_model_keeps_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("qwen3")
    ids = torch.randint(3, 300, (4, 19))
    before = model(ids).logits
    assert speed_up_linear_layers(model) == 2 * 7 + 1  # two layers: queries, keys, values, output; gate, up, down; and the head
    monkeypatch.setattr(F, "linear", None)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


def test_output_without_gradients_is_the_same_bit_for_bit() -> None:
    layer = nn.Linear(24, 50)
    speed_up_linear_layers(layer)
    x = torch.randn(64, 24)
    with torch.inference_mode():
        without_gradients = layer(x)
    assert torch.equal(without_gradients, layer(x))


def test_sums_of_nothing_are_zero() -> None:
    assert torch.equal(product(torch.ones(40, 0), torch.ones(3, 0)), torch.zeros(40, 3))


def test_the_compiler_traces_the_ordinary_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compiled on CUDA in half precision; nor must the look at the processor break their graph."""
    layer = nn.Linear(24, 50)
    speed_up_linear_layers(layer)
    monkeypatch.setattr(cpu_products, "onednn_is_faster", lambda: pytest.fail("called while a layer runs"))
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(layer, backend=record, fullgraph=True)(torch.randn(64, 24))
    assert any("linear" in target for target in targets)
    assert not any("mkldnn" in target for target in targets)


def test_half_precision_is_not_replaced() -> None:
    layer = nn.Linear(24, 50).bfloat16()
    x = torch.randn(64, 24).bfloat16()
    before = layer(x)
    speed_up_linear_layers(layer)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)


@pytest.mark.parametrize(("capability", "expected"), [("AVX512", True), ("AVX2", False)])
def test_only_processors_of_amd_with_avx_512_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, expected: bool
) -> None:
    for vendor in ("AuthenticAMD", "GenuineIntel"):
        (tmp_path / vendor).write_text(f"processor: 0\nvendor_id: {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert onednn_is_faster(tmp_path / "AuthenticAMD") == expected
    assert not onednn_is_faster(tmp_path / "GenuineIntel")
    assert not onednn_is_faster(tmp_path / "absent")
