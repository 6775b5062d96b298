"""QLoRA on a GPU: bitsandbytes' CUDA kernels against its CPU ones, compiled layers, offload, and memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.quantized_base import BasePrecision, QuantizedBase, stored_bytes
from fuligo.models.quantized_linear import QuantizedLinear, quantized_weights
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import join_world
from tests import shares, tiny, train_batches
from tests.gpu.test_trainer_cuda import LENGTHS, gradients, set_adapter, worker

pytest.importorskip("bitsandbytes")

PRECISIONS: list[BasePrecision] = ["nf4", "8bit"]


@pytest.fixture(scope="module", autouse=True)
def cuda_world():
    """Return a world of one rank with a process group, which half precision under FSDP needs."""
    world = join_world(0, 1, "cuda", store=HashStore(), key=None, timeout_s=60)
    yield world
    dist.destroy_process_group()


def lora(precision: BasePrecision) -> dict[str, Any]:
    return {"lora": LoraSettings(AdapterConfig(rank=4, alpha=128.0), base_precision=precision), "sync_dtype": "bf16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_is_that_of_the_cpu(precision: BasePrecision, dtype: str) -> None:
    torch.manual_seed(0)
    linear, base = nn.Linear(768, 512, bias=False), QuantizedBase(precision, dtype)
    cpu = QuantizedLinear(linear, base)
    cuda = QuantizedLinear(linear.cuda(), base)
    assert cuda.packed.nbytes + cuda.scales.nbytes == stored_bytes(768 * 512, precision)
    differing = (cuda.weight.cpu() != cpu.weight).float().mean()
    assert differing < 1e-3, "a value between two of the code may be rounded to the other one"
    assert (cuda.weight.cpu() - cpu.weight).abs().max() <= 0.35 * linear.weight.abs().max().cpu()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logprobs_and_gradients_equal_the_cpus(checkpoint: Path, precision: BasePrecision) -> None:
    """In 8 bits the kernels for CPUs and GPUs round some weights to neighboring values: up to 0.04 nats on an H100."""
    logprob_bound, gradient_bound = {"nf4": (2e-3, 5e-3), "8bit": (0.06, 0.05)}[precision]
    samples = train_batches.samples(LENGTHS)
    ranks = [worker(checkpoint, device, **lora(precision)) for device in ("cpu", "cuda")]
    for rank in ranks:
        set_adapter(rank, std=0.02)
    scored = [shares.scored(rank, samples) for rank in ranks]
    for theirs, ours in zip(*scored, strict=True):
        np.testing.assert_allclose(ours.old_logprobs, theirs.old_logprobs, atol=logprob_bound)
    expected, got = (gradients(rank, train_batches.batch(scored[0])) for rank in ranks)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= gradient_bound * largest, name


@pytest.mark.parametrize("experts", [False, True])
def test_experts_equal_the_cpus(tmp_path: Path, experts: bool) -> None:
    """In bfloat16 a router sends a token near a tie to another expert: the direction of all gradients together is compared."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    mixture = tiny.save_checkpoint(tmp_path, "qwen3_moe", hidden=256, layers=3, initializer_range=0.05, **sizes)
    adapter = LoraSettings(AdapterConfig(rank=4, alpha=16.0, adapts_experts=experts), base_precision="nf4")
    found = {}
    for device, precision in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        rank = worker(mixture, device, precision, lora=adapter, sync_dtype="bf16")
        set_adapter(rank, std=0.05)
        found[device, precision] = gradients(rank, train_batches.batch(train_batches.samples([(4, 90), (60, 9), (2, 1)])))
    exact = found["cpu", "fp32"]
    largest = max(gradient.abs().max() for gradient in exact.values())
    for name, gradient in found["cuda", "fp32"].items():
        assert (gradient - exact[name]).abs().max() <= 5e-3 * largest, name
    ours, theirs = (np.concatenate([each[name].numpy().ravel() for name in exact]) for each in (found["cuda", "bf16"], exact))
    assert np.isfinite(ours).all()
    assert ours @ theirs >= 0.9 * np.linalg.norm(ours) * np.linalg.norm(theirs)


def test_compiled_layers_compute_the_same(checkpoint: Path) -> None:
    samples = train_batches.samples(LENGTHS)
    compiled, plain = (worker(checkpoint, "cuda", "bf16", torch_compile=on, **lora("nf4")) for on in (True, False))
    for rank in (compiled, plain):
        set_adapter(rank, std=0.02)
    ours, theirs = (np.concatenate([each.old_logprobs for each in shares.scored(rank, samples)]) for rank in (compiled, plain))
    assert np.abs(ours - theirs).mean() <= 0.1
    batch = train_batches.batch(shares.scored(plain, samples))
    expected, got = gradients(plain, batch), gradients(compiled, batch)
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 0.1 * scale, name


def test_offload_and_onload_restore_the_base(checkpoint: Path) -> None:
    rank = worker(checkpoint, "cuda", "bf16", **lora("nf4"))
    before = {name: layer.weight.cpu() for name, layer in quantized_weights(rank.policy.model).items()}
    rank.offload()
    assert all(layer.packed.untyped_storage().nbytes() == 0 for layer in quantized_weights(rank.policy.model).values())
    rank.onload()
    for name, layer in quantized_weights(rank.policy.model).items():
        assert torch.equal(layer.weight.cpu(), before[name]), name


def test_no_dequantized_matrix_outlives_its_product() -> None:
    """A chain of layers keeps packed bytes only: neither pass holds more than a few dequantized matrices at a time."""
    size, count = 2048, 24
    base = QuantizedBase("nf4", "bfloat16")
    layers = [QuantizedLinear(nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16), base) for _ in range(count)]
    x = torch.randn(8, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def chain(y: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            y = layer(y)
        return y.float().sum()

    for run in (chain, torch.compile(chain)):
        run(x).backward()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(x).backward()
        assert torch.cuda.max_memory_allocated() - held < 6 * 2 * size**2
