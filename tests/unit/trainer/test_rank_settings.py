"""Settings that are sent to ranks on other machines."""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks import world
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, OptimizerSettings
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings


def paths(settings: object) -> Iterator[Path]:
    """Yield all paths in the settings."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Path):
            yield value
        elif is_dataclass(value):
            yield from paths(value)


def test_no_path_depends_on_where_a_rank_is_started() -> None:
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-3))
    critic = CriticSettings(Path("values"), optimizer)
    names = [Path("model"), Path("first"), Path("reference"), Path("teacher")]
    model, first, reference, teacher = names
    settings = TorchTrainerSettings(model, first, optimizer, reference_weights=reference, teacher_weights=teacher, critic=critic)
    assert sorted(paths(settings)) == sorted([*names, Path("values")])
    moved = settings.with_absolute_paths()
    assert sorted(paths(moved)) == sorted(Path.cwd() / path for path in paths(settings))


def test_a_rank_that_leaves_its_gpu_to_engines_pins_memory_with_many_threads() -> None:
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-3))
    alone = TorchTrainerSettings(Path("model"), Path("model"), optimizer, device="cuda")
    megatron = MegatronTrainerSettings(Path("model"), Path("model"), optimizer, device="cuda", shares_device=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in alone.environment
    for shared in (replace(alone, shares_device=True), megatron):
        assert "pinned_use_cuda_host_register:True" in shared.environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert megatron.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in replace(megatron, device="cpu").environment


def test_environment_keeps_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MegatronTrainerSettings(Path("model"), Path("model"), OptimizerSettings(LearningRateSchedule(peak=1e-3)))
    for name in settings.environment:
        monkeypatch.setenv(name, "mine")
    world.set_environment(settings)
    assert {os.environ[name] for name in settings.environment} == {"mine"}
