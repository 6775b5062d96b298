"""SGLang's configuration and model classes load converted FP8 checkpoints, and load others as new weights.

Its FP8 kernels need a GPU (on a CPU: AMX and its kernel package), so nothing is computed here.
"""

import json
from pathlib import Path

import pytest

from fuligo.convert.fp8 import convert
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from tests.fp8 import save_family
from tests.sglang.engines import run_program

CASES = {
    ("qwen3", "block"): "Qwen3ForCausalLM",
    ("qwen3", "channel"): "Qwen3ForCausalLM",
    ("qwen3", "tensor"): "Qwen3ForCausalLM",
    ("glm4", "block"): "Glm4ForCausalLM",
    ("qwen3_moe", "block"): "Qwen3MoeForCausalLM",
    ("qwen3_moe", "channel"): "Qwen3MoeForCausalLM",
    ("glm4_moe", "block"): "Glm4MoeForCausalLM",
    ("glm4_moe_lite", "block"): "Glm4MoeLiteForCausalLM",
    ("glm4_moe_lite", "channel"): "Glm4MoeLiteForCausalLM",
}
"""DeepSeek-V3's class needs on a CPU a rope scaling that the tiny model lacks; GLM-4.7-Flash's is made of the same parts."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    """Load a checkpoint and then other weights in its place for each case, in one process; return SGLang's reports."""
    directory = tmp_path_factory.mktemp("fp8")
    saved: list[str] = []
    for family, strategy in CASES:
        for seed in (0, 1):
            source, save = directory / f"{family}-{seed}", directory / f"{family}-{seed}-{strategy}"
            if not source.exists():
                save_family(source, family, seed=seed)
            convert(plan_hf_to_fp8(["--model-dir", str(source), "--save-dir", str(save), "--strategy", strategy]), lambda _: None)
            saved.append(str(save))
    lines = [json.loads(line) for line in run_program("fp8_loader", *saved) if line.startswith("{")]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_sglang_loads_it(case: tuple[str, str], loaded: dict[tuple[str, str], dict]):
    found = loaded[case]
    assert found["class"] == CASES[case]
    assert found["quantization"] == ("fp8" if case[1] == "block" else "compressed-tensors")
    for load in found["loads"]:
        assert load["unset"] == [] and load["values"] and load["scales"]


def test_transformers_loads_it_with_compressed_tensors(tmp_path: Path):
    """The package is in SGLang's environment. tests/unit/checkpoint tests blocks, which need no package."""
    source, strategies = save_family(tmp_path / "source", "qwen3"), ("channel", "tensor")
    for strategy in strategies:
        save = ["--save-dir", str(tmp_path / strategy), "--strategy", strategy]
        convert(plan_hf_to_fp8(["--model-dir", str(source), *save]), lambda _: None)
    lines = run_program("compressed_loader", source, *(tmp_path / strategy for strategy in strategies))
    for strategy, line in zip(strategies, lines[-2:], strict=True):
        wrong_keys, difference = json.loads(line)
        assert wrong_keys == [] and 0 < difference < 0.2, strategy
