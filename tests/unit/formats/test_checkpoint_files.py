"""Files that a distributed checkpoint copies from a Hugging Face directory."""

import json
from pathlib import Path

import pytest

from fuligo.convert.compare import compare
from fuligo.convert.dist_to_hf import dist_to_hf
from fuligo.convert.fp8 import convert
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.formats.checkpoint_files import TENSORS, copy_model_files, other_files
from fuligo.formats.hugging_face import is_quantized
from fuligo.trainer.ranks.world import World
from tests.fp8 import save_family


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_of_an_fp8_checkpoint_as_of_the_one_that_it_was_made_from(strategy: str, tmp_path: Path):
    """Engines use FP8 while the trainer saves unquantized weights, so its checkpoint has no quantization_config."""
    source = save_family(tmp_path / "source", "qwen3")
    convert(plan_hf_to_fp8(["--model-dir", str(source), "--save-dir", str(tmp_path / "fp8"), "--strategy", strategy]), lambda _: None)
    for name in ("source", "fp8"):
        copy_model_files(tmp_path / name, tmp_path / f"{name}-files")
    of_source, of_fp8 = (
        {file.name: json.loads(file.read_text()) for file in (tmp_path / f"{name}-files").glob("*.json")} for name in ("source", "fp8")
    )
    assert of_fp8 == of_source and TENSORS in of_source


def test_no_weights_in_any_format(tmp_path: Path):
    """A directory may hold the model in several formats; none of them is copied beside the saved weights."""
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE"}
    weights = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model-q8.gguf", "model.onnx", "tf_model.h5"}
    for name in kept | weights:
        (tmp_path / name).touch()
    assert {file.name for file in other_files(tmp_path)} == kept


def test_an_export_with_the_files_of_an_fp8_checkpoint_is_not_quantized_either(tmp_path: Path):
    source, fp8 = save_family(tmp_path / "source", "qwen3"), tmp_path / "fp8"
    convert(plan_hf_to_fp8(["--model-dir", str(source), "--save-dir", str(fp8)]), lambda _: None)
    hf_to_dist(source, tmp_path / "dist", World())
    dist_to_hf(tmp_path / "dist" / "release", tmp_path / "export", model=fp8)
    assert not is_quantized(tmp_path / "export")
    assert not [result for result in compare(source, tmp_path / "export") if result.difference]
