"""Weights that training cannot start from."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuligo.errors import CheckpointError
from fuligo.trainer.parameters import require_finite_weights
from fuligo.trainer.torch_backend.model import load_model
from fuligo.trainer.torch_backend.tensor_files import TensorFiles, write_tensors
from tests import tiny

DAMAGED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_value_is_found_and_named(value: float, dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 9).to(dtype)
    require_finite_weights([("sound", tensor), ("empty", torch.empty(0)), ("ids", torch.arange(3))], Path("here"))
    tensor[3, 4] = value
    with pytest.raises(
        CheckpointError, match=r"cannot load here: damaged has values that are NaN or infinite \(1 of 63\); copy or download"
    ):
        require_finite_weights([("sound", torch.ones(2)), ("damaged", tensor)], Path("here"))


def test_a_model_with_such_a_value_is_not_loaded(model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    weights[DAMAGED][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    load_model(model)
    with pytest.raises(CheckpointError, match=rf"{DAMAGED} has values that are NaN or infinite \(1 of"):
        load_model(directory)


def test_a_state_with_such_a_value_is_not_resumed(tmp_path: Path) -> None:
    write_tensors(tmp_path, [("exp_avg", torch.tensor([0.0, float("inf")]))], stem="optimizer")
    with pytest.raises(CheckpointError, match=r"optimizer-00000\.safetensors: exp_avg has values that are NaN or infinite \(1 of 2\)"):
        list(TensorFiles(tmp_path, stem="optimizer").read_all())
