"""JSON schema of config files against the reader of config files."""

import functools
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fuligo.config import Config
from fuligo.config.files import save_yaml
from fuligo.config.json_schema import json_schema
from fuligo.errors import ConfigError
from tests.config_files import load_yaml

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = sorted(path for path in REPOSITORY.glob("examples/*/*.yaml") if "kind:" not in path.read_text())


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def is_valid(file: Path) -> bool:
    return validator().is_valid(yaml.safe_load(file.read_text()))


def readable(file: Path) -> bool:
    try:
        load_yaml(file)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_that_can_be_read_is_valid(example: Path) -> None:
    assert is_valid(example) or not readable(example)


def test_a_written_config_is_valid(tmp_path: Path) -> None:
    save_yaml(Config(), tmp_path / "config.yaml")
    assert is_valid(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "content",
    [
        {"optimizer": {"lr": "1e-6"}},
        {"rollout": {"rollout_stop": ["a"], "rollout_temperature": 0.5}, "data": None},
        {"reward": {"extra_rm_weights": [0.5, 1]}},
        {"sglang": {"mem_fraction_static": 0.7}},
        {"optimizer": {"learning_rate": 1}},
        {"optimiser": {}},
        {"rollout": {"rollout_batch_size": 0}},
        {"rollout": {"rollout_batch_size": "many"}},
        {"algorithm": {"advantage_estimator": "gpro"}},
        {"train": {"balance_data": 1}},
        {"optimizer": {"lr": None}},
        {"eval": {"eval_prompt_data": None, "eval_interval": None}},
        {"eval": {"eval_interval": None}},
        {"rollout": {"rollout_stop": "a"}},
        [],
    ],
    ids=str,
)
def test_schema_and_reader_agree(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    assert is_valid(file) == readable(file)
