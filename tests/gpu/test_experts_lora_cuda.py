"""LoRA of MoE experts on a GPU: grouped products with experts that have no tokens, and gradients of the torch trainer."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.experts_adapter import low_rank_products
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import join_world
from fuligo.trainer.torch_backend.weights import full_tensor
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, train_batches
from tests.gpu.test_trainer_cuda import set_adapter, worker

SPLITS = {
    "first and last": [0, 5, 37, 1, 3, 0],
    "most": [0, 0, 0, 64, 0, 0],
    "none": [7, 5, 37, 1, 3, 11],
}
LORA = LoraSettings(AdapterConfig(rank=6, alpha=24.0, adapts_experts=True))


@pytest.fixture(scope="module", autouse=True)
def cuda_world():
    """Return a world of one rank with a process group, which half precision under FSDP needs."""
    world = join_world(0, 1, "cuda", store=HashStore(), key=None, timeout_s=60)
    yield world
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    directory = tmp_path_factory.mktemp("mixture")
    return tiny.save_checkpoint(directory, "qwen3_moe", hidden=256, layers=3, initializer_range=0.05, **sizes)


def fill_freed_memory() -> None:
    """Leave NaNs in the memory that the next tensors take, so that a product that skips an expert is seen."""
    torch.full((2**26,), float("nan"), device="cuda")
    for size in (2**12, 2**14, 2**16, 2**18, 2**20):
        held = [torch.full((size,), float("nan"), device="cuda") for _ in range(16)]
        del held


@pytest.mark.parametrize("rank", [8, 6, 16])
@pytest.mark.parametrize("splits", SPLITS)
def test_products_of_experts_without_tokens_are_those_of_a_loop(splits: str, rank: int) -> None:
    sizes, inputs, outputs = SPLITS[splits], 256, 384
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return (0.1 * torch.randn(shape, generator=generator)).to("cuda", torch.bfloat16)

    tensors = [values(sum(sizes), inputs), values(len(sizes), rank, inputs), values(len(sizes), outputs, rank)]
    upstream = values(sum(sizes), outputs)
    rows, a, b = (tensor.clone().requires_grad_() for tensor in tensors)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    fill_freed_memory()
    products = low_rank_products(rows, a, b, ends)
    fill_freed_memory()
    products.backward(upstream)

    rows_, a_, b_ = (tensor.float().requires_grad_() for tensor in tensors)
    expected = torch.cat([part @ a_[i].T @ b_[i].T for i, part in enumerate(rows_.split(sizes))])
    expected.backward(upstream.float())
    torch.testing.assert_close(products.float(), expected, rtol=0.05, atol=0.02)
    for got, exact in ((rows.grad, rows_.grad), (a.grad, a_.grad), (b.grad, b_.grad)):
        assert got is not None
        assert exact is not None
        assert (got.float() - exact).abs().max() <= 0.03 * exact.abs().max()
    for i, size in enumerate(sizes):
        if size == 0:
            assert not a.grad[i].any()
            assert not b.grad[i].any()


def gradients(rank: TorchRankWorker, lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
    rank.gradients(shares.to_train(rank, train_batches.batch(train_batches.samples(lengths)))[0])
    return {name: full_tensor(p.grad).float().cpu() for name, p in rank.policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths", [[(4, 90), (60, 9), (3, 90), (8, 20)], [(2, 1)]], ids=["long", "few tokens"])
def test_gradients_of_experts_adapters_equal_the_cpus(mixture: Path, lengths: list[tuple[int, int]]) -> None:
    """In bfloat16 a router sends a token near a tie to another expert: the direction of all gradients together is compared."""
    found = {}
    for device, precision in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        rank = worker(mixture, device, precision, lora=LORA)
        set_adapter(rank, std=0.05)
        found[device, precision] = gradients(rank, lengths)
    exact = found["cpu", "fp32"]
    assert any(".experts." in name for name in exact)
    largest = max(gradient.abs().max() for gradient in exact.values())
    for name, gradient in found["cuda", "fp32"].items():
        assert (gradient - exact[name]).abs().max() <= 1e-3 * largest, name
    ours, theirs = (np.concatenate([each[name].numpy().ravel() for name in exact]) for each in (found["cuda", "bf16"], exact))
    assert np.isfinite(ours).all()
    assert ours @ theirs >= 0.9 * np.linalg.norm(ours) * np.linalg.norm(theirs)
