"""Valid config, of which tests change one thing at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.assignments import Assignment, build_config
from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change
from fuligo.config.flags import flags

MakeConfig = Callable[..., Config]
Values = dict[str, Any]

VALID = {
    "hf_checkpoint": "models/tiny",
    "prompt_data": "prompts.jsonl",
    "label_key": "label",
    "num_rollout": 10,
    "rm_type": "deepscaler",
}

SGLANG: Values = {"rollout_backend": "sglang", "rollout_num_gpus": 4, "actor_num_gpus_per_node": 4}
"""Flags for engines on their own GPUs."""
SERVED_TEACHER: Values = {"name": "teacher", "model_path": "t", "update_weights": False, "server_groups": [{"num_gpus": 2}]}
WITH_TEACHER: Values = {**SGLANG, "sglang_config": [{"server_groups": [{"num_gpus": 2}]}, SERVED_TEACHER], "use_opd": True}
"""Flags for a teacher on two of the four GPUs."""
SHARED: Values = {"rollout_backend": "sglang", "colocate": True, "actor_num_gpus_per_node": 4}
"""Flags for engines on the trainer's GPUs."""

PPO: Values = {"advantage_estimator": "ppo"}


def config_with(**values: Any) -> Config:
    """Return the valid config with these flags changed; None unsets a flag."""
    return build_config(Assignment(flags()[name], value, name) for name, value in {**VALID, **values}.items())


def config_of(values: Values) -> Config:
    """Return the valid config with these flags changed; `sglang_...`, `router_...` and `megatron_...` are pass-through arguments."""
    typed = {name: value for name, value in values.items() if name in flags()}
    passed = [Change(tuple(name.split("_", 1)), value) for name, value in values.items() if name not in typed]
    return apply_changes(config_with(**typed), passed)


@pytest.fixture
def make_config() -> MakeConfig:
    return config_with
