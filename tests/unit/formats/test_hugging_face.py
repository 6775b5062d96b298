import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import PreTrainedModel

from fuligo.formats.hugging_face import DamagedFileError, architecture_difference, checkpoint_problems, is_quantized, read_shapes
from tests import tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    tiny.tokenizer().save_pretrained(directory)
    model = tiny.model()
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def edit_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_shapes_are_those_that_safetensors_reads(whole: Path, sharded: Path) -> None:
    with safe_open(whole / "model.safetensors", "np") as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert read_shapes(whole) == expected == read_shapes(sharded)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_whole_checkpoints_have_no_problems(tmp_path: Path, family: str) -> None:
    assert list(checkpoint_problems(tiny.save_checkpoint(tmp_path, family))) == []


def test_a_sharded_checkpoint_has_no_problems(sharded: Path) -> None:
    assert list(checkpoint_problems(sharded)) == []


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file_is_found(copy: Path, kept: float) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    (problem,) = checkpoint_problems(copy)
    assert str(file) in problem
    assert "truncated" in problem or "safetensors header" in problem


def test_other_damage_is_found(copy: Path) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content + b"x", b"\xff" * 200, (2).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"{x"):
        file.write_bytes(damaged)
        (problem,) = checkpoint_problems(copy)
        assert str(file) in problem


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ("config.json", "config.json is missing; the directory must be a Hugging Face checkpoint"),
        ("model.safetensors", "has no *.safetensors files"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
def test_missing_files_are_named(copy: Path, lost: str, text: str) -> None:
    for file in copy.glob(lost):
        file.unlink()
    (problem,) = checkpoint_problems(copy)
    assert text in problem


def test_a_missing_shard_and_a_misplaced_tensor_are_named(sharded: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sharded, tmp_path / "copy"))
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["lm_head.extra"] = next(iter(index["weight_map"].values()))
    index_file.write_text(json.dumps(index))
    assert "lacks lm_head.extra" in "".join(checkpoint_problems(directory))
    for content in ([], {}, {"weight_map": []}):
        (tmp_path / "index.json").write_text(json.dumps(content))
        shutil.copy(tmp_path / "index.json", Path(shutil.copytree(sharded, tmp_path / f"copy {content}")) / index_file.name)
        assert "has no weight_map" in next(checkpoint_problems(tmp_path / f"copy {content}"))
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    (problem,) = checkpoint_problems(directory)
    assert str(shard) in problem and "No such file" in problem


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"vocab_size": 401}, "vocab_size 401"),
        ({"hidden_size": 96}, "hidden_size 96"),
        ({"num_hidden_layers": 3}, "the weights have 2 layers, but config.json says num_hidden_layers 3"),
        ({"num_hidden_layers": 1}, "the weights have 2 layers"),
    ],
)
def test_weights_of_another_architecture_are_found(copy: Path, values: dict[str, int], text: str) -> None:
    edit_config(copy, **values)
    problems = list(checkpoint_problems(copy))
    assert problems and all("config.json says" in problem for problem in problems)
    assert text in problems[0]


def test_next_token_prediction_layers_come_after_the_others(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=1, num_nextn_predict_layers=1)
    assert list(checkpoint_problems(copy)) == []


def test_the_language_model_of_a_multi_modal_checkpoint_is_looked_at(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"model_type": "vision", "text_config": {**config, "vocab_size": 7}}))
    assert "vocab_size 7" in next(checkpoint_problems(copy))


def test_a_config_that_is_none_is_named(copy: Path) -> None:
    for text, cause in (("{", "not valid JSON"), ("{}", "has no model_type"), ("[]", "has no model_type")):
        (copy / "config.json").write_text(text)
        (problem,) = checkpoint_problems(copy)
        assert cause in problem and "config.json" in problem


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in next(checkpoint_problems(tmp_path / "file"))
    assert "does not exist" in next(checkpoint_problems(tmp_path / "nothing"))


def test_architectures_are_compared(whole: Path, copy: Path) -> None:
    assert architecture_difference(whole, copy) is None
    edit_config(copy, model_type="qwen2", intermediate_size=1)
    difference = architecture_difference(whole, copy)
    assert difference is not None and "model_type qwen3 and qwen2, intermediate_size 128 and 1" in difference
    edit_config(copy, model_type="qwen3", intermediate_size=None)
    assert architecture_difference(whole, copy) is None  # not said: the family's default
    (copy / "config.json").unlink()
    with pytest.raises(DamagedFileError, match=r"config\.json is missing"):
        architecture_difference(whole, copy)


def test_quantized_checkpoints_are_known(copy: Path) -> None:
    assert not is_quantized(copy)
    edit_config(copy, quantization_config={"quant_method": "fp8"})
    assert is_quantized(copy)
