"""FP8 values and scales against the definition of e4m3, and the tensors that engines on an FP8 checkpoint receive."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.errors import WeightSyncError
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.fp8 import quantize, quantized_weights
from fuligo.formats.quantization import EngineQuantization, Quantization
from fuligo.formats.stored_experts import StoredExperts
from tests.fp8 import dequantize, e4m3_numbers, half_steps

STRATEGIES = {
    "block": Quantization("block", (128, 128)),
    "small blocks": Quantization("block", (16, 8)),
    "channel": Quantization("channel"),
    "tensor": Quantization("tensor"),
}
BLOCKS = STRATEGIES["block"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(rows: int, columns: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return a matrix with rows of different magnitudes, so that scales differ."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 1, rows)[torch.randperm(rows, generator=generator)]
    return (torch.randn(rows, columns, generator=generator) * sizes[:, None]).to(dtype)


def test_torch_has_the_numbers_of_e4m3():
    assert np.array_equal(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy(), e4m3_numbers())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_value_is_the_nearest(name: str, dtype: torch.dtype):
    """Compare with a search among all e4m3 numbers in float64; shapes include partial blocks."""
    quantization, original = STRATEGIES[name], weight(200, 140, dtype=dtype)
    values, scales = quantize(original, quantization)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert tuple(scales.shape) == quantization.scale_shape((200, 140))
    difference = np.abs(dequantize(values, scales, quantization).double().numpy() - original.double().numpy())
    of_ones = torch.ones(values.shape).to(torch.float8_e4m3fn)
    each_scale = dequantize(of_ones, scales, quantization).double().numpy()
    assert (difference <= half_steps(values.float().numpy()) * each_scale * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_largest_value_of_a_block_is_the_largest_of_the_format(name: str):
    quantization, original = STRATEGIES[name], weight(256, 128)
    values, scales = quantize(original, quantization)
    rows, columns = quantization.block_of((256, 128))
    largest = values.float().abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
    assert bool((largest == 448).all()) and largest.numel() == scales.numel()


def test_a_block_of_zeros_stays_zero():
    values, scales = quantize(torch.zeros(128, 256, dtype=torch.bfloat16), BLOCKS)
    assert scales.tolist() == [[1.0, 1.0]] and not values.float().any()


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30, 3e38])
def test_extreme_sizes_stay_finite(size: float):
    original = torch.full((2, 4), size)
    values, scales = quantize(original, Quantization("channel"))
    assert bool(dequantize(values, scales, Quantization("channel")).isfinite().all()) and bool(scales.isfinite().all())


def test_no_scale_is_below_what_every_device_divides_by():
    """Kernels may flush numbers below 2**-126 to zero, and division by zero is not finite."""
    values, scales = quantize(torch.full((128, 128), 1e-40), BLOCKS)
    assert scales.item() == torch.finfo(torch.float32).tiny
    assert bool(values.float().isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float):
    original = weight(4, 8)
    original[2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(original, BLOCKS)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16]), st.sampled_from(list(STRATEGIES)))
def test_what_is_quantized_stays_so(rows: int, columns: int, seed: int, name: str):
    """Quantizing twice gives the same values; scales change by at most one float32 rounding."""
    quantization = STRATEGIES[name]
    values, scales = quantize(weight(rows, columns, seed=seed), quantization)
    again, scales_again = quantize(dequantize(values, scales, quantization), quantization)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(scales_again, scales, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


class TestStream:
    def test_what_the_checkpoint_stores_in_fp8_is_quantized(self):
        names = ["model.layers.0.self_attn.o_proj.weight", "model.norm.weight"]
        original = {names[0]: weight(256, 128), names[1]: weight(1, 128)[0]}
        sent = list(quantized_weights(original.items(), EngineQuantization(BLOCKS, frozenset(names[:1]))))
        assert [name for name, _ in sent] == [names[0], f"{names[0]}_scale_inv", names[1]]
        values, scales = quantize(original[names[0]], BLOCKS)
        assert torch.equal(sent[0][1].view(torch.uint8), values.view(torch.uint8)) and torch.equal(sent[1][1], scales)
        assert sent[2][1] is original[names[1]]

    def test_what_it_stores_otherwise_is_not(self):
        """A published checkpoint may leave more matrices unquantized than the converter does."""
        sent = quantized_weights([("model.layers.0.self_attn.o_proj.weight", weight(128, 128))], EngineQuantization(BLOCKS, frozenset()))
        assert [tensor.dtype for _, tensor in sent] == [torch.bfloat16]

    def test_experts_that_are_one_tensor_are_taken_apart(self):
        gate_up, down = torch.randn(3, 2 * 4, 6), torch.randn(3, 6, 4)
        name = "model.layers.1.mlp.experts"
        apart = dict(checkpoint_weights([(f"{name}.gate_up_proj", gate_up), (f"{name}.down_proj", down)]))
        assert len(apart) == 9
        for expert in range(3):
            assert torch.equal(apart[f"{name}.{expert}.gate_proj.weight"], gate_up[expert, :4])
            assert torch.equal(apart[f"{name}.{expert}.up_proj.weight"], gate_up[expert, 4:])
            assert torch.equal(apart[f"{name}.{expert}.down_proj.weight"], down[expert])

    def test_experts_and_routers_of_mixtrals_kind_have_its_names(self):
        block = "model.layers.1.mlp"
        given = {
            f"{block}.experts.gate_up_proj": torch.randn(2, 2 * 4, 6),
            f"{block}.experts.down_proj": torch.randn(2, 6, 4),
            f"{block}.gate.weight": torch.randn(2, 6),
            f"{block}.e_score_correction_bias": torch.randn(2),
            "model.layers.1.self_attn.q_proj.weight": torch.randn(6, 6),
        }
        sent = dict(checkpoint_weights(given.items(), StoredExperts.MIXTRAL))
        renamed = block.replace("mlp", "block_sparse_moe")
        experts = {f"{renamed}.experts.{expert}.w{number}.weight" for expert in range(2) for number in (1, 2, 3)}
        assert sent.keys() == {
            *experts,
            f"{renamed}.gate.weight",
            f"{renamed}.e_score_correction_bias",
            "model.layers.1.self_attn.q_proj.weight",
        }
        for number, of in (("1", slice(0, 4)), ("3", slice(4, 8))):
            assert torch.equal(sent[f"{renamed}.experts.1.w{number}.weight"], given[f"{block}.experts.gate_up_proj"][1, of])
        name = f"{renamed}.experts.0.w2.weight"
        in_fp8 = dict(quantized_weights(given.items(), EngineQuantization(BLOCKS, frozenset({name})), StoredExperts.MIXTRAL))
        assert in_fp8.keys() == {*sent, f"{name}_scale_inv"}

    def test_the_fused_matrix_of_a_dense_layer_is_not(self):
        """GLM-4 checkpoints fuse gate and up projections."""
        fused = ("model.layers.0.mlp.gate_up_proj.weight", torch.randn(8, 6))
        assert list(checkpoint_weights([fused])) == [fused]

    def test_a_weight_that_is_not_finite_is_named(self):
        stream = quantized_weights([("a.weight", torch.full((2, 2), torch.nan))], EngineQuantization(BLOCKS, frozenset({"a.weight"})))
        with pytest.raises(WeightSyncError, match=r"cannot quantize a\.weight for the engines"):
            list(stream)
