"""What the planner looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fuligo.config import Config
from fuligo.config.topology import EngineGroupSpec
from fuligo.models.architecture import Architecture
from fuligo.models.find import (
    FoundConfigJson,
    find_architectures,
    find_engine_config_json,
    find_served_architectures,
    find_teacher_architecture,
    find_trainer_config_json,
)
from fuligo.planner.gpus import Gpu, gpu


@dataclass(frozen=True, slots=True)
class Subject:
    """A config with the facts of its model and its GPUs."""

    config: Config
    architecture: Architecture
    """Of `--hf-checkpoint`'s config.json, of `--model-config-file`, or of the MODEL_ARGS flags."""
    rollout_architecture: Architecture
    """Of the checkpoint that the engines load (FP8 where `--hf-checkpoint` is); else the same."""
    gpu: Gpu
    trainer_config_json: FoundConfigJson | None = None
    """Where `architecture` comes from; None where the MODEL_ARGS alone describe it."""
    engine_config_json: FoundConfigJson | None = None
    """Where `rollout_architecture` comes from, likewise."""
    own_teacher: Architecture | None = None
    """Of `--opd-teacher-load`, where its config.json is on this machine."""
    other_served: Mapping[str, Architecture] = field(default_factory=dict)
    """Of the models of `--sglang-config` with a path of their own, by that path, as far as they are known on this machine."""

    @property
    def teacher(self) -> Subject | None:
        """The same with the trainer's teacher in the policy's place; None without one. One that nothing describes is like the policy."""
        return replace(self, architecture=self.own_teacher or self.architecture) if self.config.teacher_from == "trainer" else None

    def served_by(self, spec: EngineGroupSpec) -> Architecture | None:
        """The model of a group's servers; None where nothing on this machine describes it. What follows the trainer is its model."""
        path = spec.model_path
        if path is None or path == self.config.model.hf_checkpoint:
            return self.rollout_architecture
        return self.other_served.get(path, self.rollout_architecture if spec.update_weights else None)


def read_subject(config: Config, gpu_name: str) -> Subject:
    """The subject of a config, with the model's facts from this machine.

    Raises:
        ConfigError: the GPU is not known, or nothing says what the model's shape is.
    """
    trained, served = find_architectures(config)
    return Subject(
        config,
        trained,
        served,
        gpu(gpu_name),
        find_trainer_config_json(config),
        find_engine_config_json(config),
        find_teacher_architecture(config),
        find_served_architectures(config),
    )
