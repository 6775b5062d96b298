"""Valid config, of which tests change one thing at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.assignments import Assignment, build_config
from fuligo.config.flags import flags

MakeConfig = Callable[..., Config]

VALID = {
    "hf_checkpoint": "models/tiny",
    "prompt_data": "prompts.jsonl",
    "label_key": "label",
    "num_rollout": 10,
    "rm_type": "deepscaler",
}


def config_with(**values: Any) -> Config:
    """Return the valid config with these flags changed; None unsets a flag."""
    return build_config(Assignment(flags()[name], value, name) for name, value in {**VALID, **values}.items())


@pytest.fixture
def make_config() -> MakeConfig:
    return config_with
