"""Capabilities of trainers and engines."""

from typing import get_args

import pytest

from fuligo.config import Config
from fuligo.config.capabilities import ENGINE_CAPABILITIES, TRAINER_CAPABILITIES
from fuligo.config.groups.run import ClusterFlags


def test_every_backend_has_capabilities() -> None:
    def names(flag: str) -> set[str]:
        return set(get_args(ClusterFlags.model_fields[flag].annotation)) - {"auto"}

    assert TRAINER_CAPABILITIES.keys() == names("train_backend")
    assert ENGINE_CAPABILITIES.keys() == names("rollout_backend")


@pytest.mark.parametrize("name", TRAINER_CAPABILITIES)
def test_a_config_has_those_of_its_trainer(name: str) -> None:
    config = Config.model_validate({"cluster": {"train_backend": name}})
    assert config.trainer_capabilities is TRAINER_CAPABILITIES[name]
