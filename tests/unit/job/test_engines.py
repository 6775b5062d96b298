"""Tests of the limit for differences between engine and trainer that --check-weight-update-equal explains by rounding."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from fuligo.config.command_line import parse
from fuligo.job.engines import BF16_TOLERANCE, COARSE_TOLERANCE, FP32_TOLERANCE, _proof
from fuligo.trainer.protocol import Trainer
from fuligo.weights.proof import LogprobProof
from tests import tiny


@pytest.mark.parametrize(
    ("family", "precision", "quantized", "tolerance"),
    [
        ("qwen3", "fp32", False, FP32_TOLERANCE),
        ("qwen3", "bf16", False, BF16_TOLERANCE),
        ("qwen3", "bf16", True, COARSE_TOLERANCE),
        ("qwen3_moe", "fp32", False, FP32_TOLERANCE),
        ("qwen3_moe", "bf16", False, COARSE_TOLERANCE),
        ("qwen3_next", "bf16", False, COARSE_TOLERANCE),
    ],
)
def test_rounding_explains_more_where_it_is_amplified(
    tmp_path: Path, family: str, precision: str, quantized: bool, tolerance: float
) -> None:
    sizes = cast(Any, tiny.model(family)).config.to_dict() | ({"quantization_config": {"quant_method": "fp8"}} if quantized else {})
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = parse(["--hf-checkpoint", str(tmp_path), "--rollout-backend", "sglang", "--precision", precision, "--device", "cpu"]).config
    proof = _proof(config, cast(Trainer, None))
    assert isinstance(proof, LogprobProof) and proof.tolerance == tolerance
