"""`fuligo convert fp8` and the script with its old name: output and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from fuligo import cli
from tests.fp8 import save_family

REPOSITORY = Path(__file__).parents[3]
GLM45 = REPOSITORY / "examples" / "glm4.5-355b" / "model"


def test_a_conversion_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, save = save_family(tmp_path / "model", "qwen3", num_files=2), tmp_path / "fp8"
    command = ["convert", "fp8", "--model-dir", str(model), "--save-dir", str(save), "--max-workers", "2"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    num_files = len(list(model.glob("*.safetensors")))
    assert f"({num_files} of {num_files})" in shown
    assert shown.endswith(f"{save} is complete and was compared with {model}\n")
    assert cli.main(command) == 0  # a second time it only compares
    assert capsys.readouterr().out.count("already exists and is correct") == num_files


def test_without_weights_there_is_a_plan_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["convert", "fp8", "--model-dir", str(GLM45), "--save-dir", str(tmp_path / "fp8")]
    assert cli.main([*command, "--plan"]) == 0
    assert "355 B parameters (99.5%) to FP8" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "has no *.safetensors files" in capsys.readouterr().err
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize(("more", "code"), [(["--plan"], 0), (["--max-workers", "0"], 2), (["--strategy", "blocks"], 2)])
def test_the_script_is_the_same(more: list[str], code: int, tmp_path: Path):
    command = [sys.executable, str(REPOSITORY / "tools" / "convert_hf_to_fp8.py"), "--model-dir", str(GLM45)]
    done = subprocess.run([*command, "--save-dir", str(tmp_path / "fp8"), *more], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == code, done.stderr
    assert ("128 x 128" in done.stdout) == (code == 0)
