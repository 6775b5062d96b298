"""Sources of the model's shapes: config.json files and flags."""

import json
from pathlib import Path
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.find import find_architectures, find_engine_config_json, find_trainer_config_json
from fuligo.models.megatron_flags import megatron_flags
from fuligo.models.registry import architecture_of

QWEN3 = read_config_json(Path(__file__).parents[3] / "examples" / "qwen3-4b" / "model") | {"num_hidden_layers": 2}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


def checkpoint(directory: Path, **changed: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3 | changed))
    return str(directory)


def config_of(**groups: dict[str, Any]) -> Config:
    return Config.model_validate(groups)


def test_the_checkpoint_says_what_both_run(tmp_path: Path) -> None:
    config = config_of(model={"hf_checkpoint": checkpoint(tmp_path / "hf")})
    assert find_architectures(config) == (architecture_of(QWEN3), architecture_of(QWEN3))


def test_a_quantized_checkpoint_is_served_and_not_trained(tmp_path: Path) -> None:
    config = config_of(model={"hf_checkpoint": checkpoint(tmp_path / "fp8", **FP8)})
    trained, served = find_architectures(config)
    assert (trained.is_quantized, served.is_quantized) == (False, True)
    assert trained.layers == served.layers


def test_a_hugging_face_directory_to_start_from_says_what_is_trained(tmp_path: Path) -> None:
    hf, ref = checkpoint(tmp_path / "fp8", **FP8), checkpoint(tmp_path / "bf16", num_hidden_layers=3)
    trained, served = find_architectures(config_of(model={"hf_checkpoint": hf}, checkpoint={"ref_load": ref}))
    assert (trained.num_layers, served.num_layers) == (3, 2)


def test_a_config_file_stands_in_for_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    for file in (directory, f"{directory}/config.json"):
        config = config_of(model={"hf_checkpoint": "/nowhere/Qwen3", "model_config_file": file}, checkpoint={"ref_load": "/nowhere/dist"})
        assert find_architectures(config) == (architecture_of(QWEN3), architecture_of(QWEN3))


def test_the_checkpoint_itself_goes_before_the_file(tmp_path: Path) -> None:
    hf, file = checkpoint(tmp_path / "hf"), checkpoint(tmp_path / "other", num_hidden_layers=5)
    config = config_of(model={"hf_checkpoint": hf, "model_config_file": file})
    found = find_engine_config_json(config)
    assert found is not None
    assert found.source == f"{hf}/config.json"
    assert find_trainer_config_json(config) == found


def test_flags_describe_a_model_without_config_json() -> None:
    flags = {name: value for name, value in megatron_flags(QWEN3).items() if name != "allgather_cp"}
    trained, served = find_architectures(config_of(megatron=flags))
    assert trained == served == architecture_of(QWEN3)


def test_flags_win_over_config_json_only_where_asked(tmp_path: Path) -> None:
    model = {"hf_checkpoint": checkpoint(tmp_path / "hf")}
    flags = {"num_layers": 7, "num_query_groups": 8}
    assert find_architectures(config_of(model=model, megatron=flags))[0].num_layers == 2
    trained, served = find_architectures(config_of(model=model | {"override_model_config": True}, megatron=flags))
    assert (trained.num_layers, served.num_layers) == (7, 2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "no --hf-checkpoint is given; .*--model-config-file"),
        ({"hf_checkpoint": "/nowhere/Qwen3"}, "--hf-checkpoint /nowhere/Qwen3 has no config.json on this machine; .*--model-config-file"),
        ({"model_config_file": "/nowhere/config.json"}, "/nowhere/config.json does not exist"),
    ],
)
def test_nothing_to_go_by_is_an_error_that_says_what_to_give(model: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_architectures(config_of(model=model))
