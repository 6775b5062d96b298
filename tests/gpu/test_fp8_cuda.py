"""FP8 on GPUs: the same bytes as on a CPU, and SGLang engines on an FP8 checkpoint that get their weights from a bf16 trainer."""

from pathlib import Path

import pytest
import torch

from fuligo.convert.fp8 import convert
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.formats.fp8 import quantize
from fuligo.formats.quantization import Quantization
from tests.e2e.records import metrics
from tests.fp8 import save_family
from tests.gpu.sglang_runs import PYTHON
from tests.gpu.test_sglang_cuda import train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [Quantization("block", (128, 128)), Quantization("channel"), Quantization("tensor")], ids=str)
def test_the_bytes_are_those_of_a_cpu(quantization: Quantization, dtype: torch.dtype) -> None:
    weight = (torch.randn(1000, 700) * torch.logspace(-6, 2, 1000)[:, None]).to(dtype)
    here, there = quantize(weight, quantization), quantize(weight.cuda(), quantization)
    for cpu, cuda in zip(here, there, strict=True):
        assert torch.equal(cpu.view(torch.uint8), cuda.cpu().view(torch.uint8))


@pytest.mark.skipif(PYTHON is None, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the trainer needs one GPU, the engine another")
@pytest.mark.parametrize("transport", ["nccl", "disk"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_engines_on_fp8_compute_what_the_trainer_has(family: str, transport: str, tmp_path: Path) -> None:
    """The weights of the FP8 checkpoint differ from those that the trainer starts from, so only a complete weight sync passes its proof."""
    served, trained = (save_family(tmp_path / f"{seed}", family, seed=seed, initializer_range=0.04) for seed in (0, 1))
    convert(plan_hf_to_fp8(["--model-dir", str(served), "--save-dir", str(tmp_path / "fp8")]), lambda _: None)
    run_dir = tmp_path / "run"
    train(
        run_dir,
        hf_checkpoint=tmp_path / "fp8",
        ref_load=trained,
        rm_type="random",
        update_weight_transport=transport,
        lr=1e-3,
        num_rollout=3,
    )
    steps = metrics(run_dir)
    assert len(steps) == 3
    assert all(step["train/logprob_abs_diff"] < 0.2 for step in steps)
