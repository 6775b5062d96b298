"""The arguments of tools/convert_hf_to_fp8.py, and what would be quantised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.convert.hf_to_fp8 import describe, plan_hf_to_fp8
from fuligo.errors import ConfigError
from fuligo.models.registry import read_architecture

REPOSITORY = Path(__file__).parents[3]
GLM45 = REPOSITORY / "examples" / "glm4.5-355b" / "model"
TOOL = REPOSITORY / "tools" / "convert_hf_to_fp8.py"


def arguments(*more: str, model: Path = GLM45) -> list[str]:
    return ["--model-dir", str(model), "--save-dir", "out", *more]


def test_every_parameter_is_quantised_or_kept():
    plan = plan_hf_to_fp8(arguments("--strategy", "block", "--block-size", "128", "128", "--max-workers", "4"))
    architecture = read_architecture(GLM45)
    assert plan.num_quantised + plan.num_kept == architecture.num_parameters + architecture.num_mtp_parameters
    assert architecture.head is not None
    assert plan.num_kept > architecture.embedding.num_parameters + architecture.head.num_parameters
    assert plan.block_size == (128, 128)
    assert plan.num_workers == 4


def test_half_the_bytes_and_a_scale_a_block():
    plan = plan_hf_to_fp8(arguments())
    assert plan.target_bytes == plan.num_quantised + plan.num_quantised // 128**2 * 4 + 2 * plan.num_kept
    assert "block: a scale a block of 128 x 128" in "\n".join(describe(plan))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--strategy", "channel", "--block-size", "128", "128"], "--block-size has no effect with --strategy channel"),
        (["--block-size", "0", "128"], "both must be at least 1"),
        (["--max-workers", "0"], "--max-workers 0: must be at least 1"),
        (["--save-dir", str(GLM45)], "is the model's own directory"),
        (["--model-dir", "nowhere"], "there is no config.json"),
        (["--model-dir", str(GLM45.with_name("model-fp8"))], "is quantised already"),
    ],
)
def test_what_does_not_go_together(given: list[str], problem: str):
    with pytest.raises(ConfigError) as refused:
        plan_hf_to_fp8(arguments(*given))
    assert problem in str(refused.value)


@pytest.mark.parametrize("wrong", [["--strategy", "blocks"], ["--block-size", "128"], ["--workers", "4"], ["--max-workers", "many"]])
def test_wrong_options_are_named(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        plan_hf_to_fp8(arguments(*wrong))
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(("more", "code"), [([], 1), (["--plan"], 0), (["--max-workers", "0"], 2)])
def test_the_tool_says_that_it_converts_nothing_yet(more: list[str], code: int, tmp_path: Path):
    command = [sys.executable, str(TOOL), *arguments("--save-dir", str(tmp_path / "out"), *more)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == code
    assert ("not built yet" in result.stderr) == (code == 1)
    assert not (tmp_path / "out").exists()
