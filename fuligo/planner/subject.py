"""Input of the planner: config, model and GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.rules.rule import set_flag
from fuligo.config.topology import EngineGroupSpec
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.layout.adapter import AdapterShape
from fuligo.models.adapter_names import adapter_of
from fuligo.models.architecture import Architecture, Layer, Part, PartKind, Split
from fuligo.models.config_json import ConfigJson
from fuligo.models.find import (
    find_architectures,
    find_engine_config_json,
    find_served_architectures,
    find_teacher_config_json,
    find_trainer_config_json,
)
from fuligo.models.registry import architecture_of, family_of, unshareable_because
from fuligo.planner import speeds
from fuligo.planner.gpus import Gpu, gpu


@dataclass(frozen=True, slots=True)
class Assumed:
    """Figures that only a run can tell; estimates of time depend on them."""

    kept_share: float = speeds.KEPT_SHARE
    """Share of the finished groups that `--dynamic-sampling-filter-path` keeps, above 0 and at most 1."""
    accept_length: float | None = None
    """Tokens per verification of drafts, as in `engine/spec_accept_length`; None: follows from `speeds.DRAFT_ACCEPTANCE`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Config with its model's shapes and its GPU's figures."""

    config: Config
    architecture: Architecture
    """Trained model, from `--hf-checkpoint`'s config.json, `--model-config-file`, or the MODEL_ARGS flags."""
    rollout_architecture: Architecture
    """Model that the engines load from `--hf-checkpoint`. It differs from `architecture` if that checkpoint is quantized or `--ref-load` is
    another Hugging Face directory, and with `--override-model-config`."""
    gpu: Gpu
    trainer_config_json: ConfigJson | None = None
    """Source of `architecture`; None if only MODEL_ARGS describe it."""
    engine_config_json: ConfigJson | None = None
    """Source of `rollout_architecture`; None if only MODEL_ARGS describe it."""
    own_teacher: Architecture | None = None
    """Model of `--opd-teacher-load`; None if it is not given, or its config.json is not on this machine."""
    teacher_config_json: ConfigJson | None = None
    """Source of `own_teacher`; None without it."""
    other_served: Mapping[str, Architecture] = field(default_factory=dict)
    """Path -> model, for models of `--sglang-config` with their own `model_path`, if their config.json is on this machine."""
    adapter_config: AdapterConfig | None = None
    """LoRA adapter that is trained instead of the weights; None without one."""
    sharing: tuple[Config, ...] = ()
    """Other runs that sample from the same engines at the same time (`fuligo train-many`)."""
    assumed: Assumed = Assumed()

    @property
    def adapter(self) -> AdapterShape | None:
        """Sizes of the adapter that is trained; None without LoRA."""
        return None if self.adapter_config is None else AdapterShape(self.adapter_config, self.architecture)

    @property
    def num_trained_parameters(self) -> int:
        """Parameters with gradients: the adapter's, or the model's without a frozen vision tower, plus those of trained MTP layers."""
        if self.adapter is not None:
            return self.adapter.num_parameters
        tower = self.architecture.vision_tower if self.config.freezes_tower else None
        mtp = self.num_loaded_mtp_parameters if self.config.train.enable_mtp_training else 0
        return self.architecture.num_parameters - (0 if tower is None else tower.num_parameters) + mtp

    @property
    def loaded_mtp_layers(self) -> tuple[Layer, ...]:
        return self.architecture.mtp_layers[: self.config.train.mtp_num_layers or 0]

    @property
    def num_loaded_mtp_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.loaded_mtp_layers)

    @property
    def num_carried_mtp_parameters(self) -> int:
        """Parameters of an MTP layer that the torch trainer's model lacks, but rank 0 keeps for checkpoints and exports (`models.mtp`)."""
        carries = not self.is_megatron and self.config.trains and family_of(self.architecture).has_mtp_module
        is_needed = carries and not self.config.uses_adapter and not self.config.train.mtp_num_layers
        return self.architecture.num_mtp_parameters if is_needed else 0

    @property
    def is_megatron(self) -> bool:
        """True if the Megatron trainer is used, so that the flags of the group `parallel` apply."""
        return self.config.trainer_capabilities.splits_model

    @property
    def teacher(self) -> Self | None:
        """Subject with the trainer's teacher in place of the policy; None without one. An unknown teacher has the policy's shape."""
        return replace(self, architecture=self.own_teacher or self.architecture) if self.config.teacher_from == "trainer" else None

    @property
    def value_model(self) -> Self:
        """Subject with the value model, all of whose weights are trained even with LoRA, in place of the policy."""
        return replace(self, architecture=value_architecture(self.architecture), adapter_config=None)

    def served_by(self, spec: EngineGroupSpec) -> Architecture | None:
        """Return the model of a group's servers, or None if unknown; servers that receive weights have the trained model."""
        path = spec.model_path
        if path is None or path == self.config.model.hf_checkpoint:
            return self.rollout_architecture
        return self.other_served.get(path, self.rollout_architecture if spec.update_weights else None)


def read_subject(config: Config, gpu_name: str, *, sharing: Sequence[Config] = (), assumed: Assumed | None = None) -> Subject:
    """Return the subject of a config, whose engines the runs `sharing` also use. `assumed` is None for the planner's own assumptions.

    Its config has `--share-prefixes off` in place of `auto` if the model or the teacher cannot share prefixes. Raises ConfigError if the
    GPU or the model's shape is unknown, or `--lora-adapter` cannot be read.
    """
    trained, served = find_architectures(config)
    try:
        adapter = adapter_of(config) if config.trains else None
    except CheckpointError as error:
        raise ConfigError(f"--lora-adapter: {error}; without the directory, plan with --lora-rank in place of --lora-adapter") from error
    trainer_config_json, teacher_config_json = find_trainer_config_json(config), find_teacher_config_json(config)
    computed = (found for found in (trainer_config_json, teacher_config_json) if found is not None)
    if config.train.share_prefixes == "auto" and any(unshareable_because(found.values) for found in computed):
        config = apply_changes(config, [set_flag("share_prefixes", "off")])
    return Subject(
        config,
        trained,
        served,
        gpu(gpu_name),
        trainer_config_json,
        find_engine_config_json(config),
        None if teacher_config_json is None else architecture_of(teacher_config_json.values, teacher_config_json.source),
        teacher_config_json,
        find_served_architectures(config),
        adapter,
        tuple(sharing),
        assumed or Assumed(),
    )


def value_architecture(policy: Architecture) -> Architecture:
    """Return the shapes of a policy's value model: an output layer of one row, not tied to the embedding, and no MTP layers."""
    head = Part(PartKind.HEAD, policy.hidden_size, Split.REPLICATED, quantizable=False)
    return replace(policy, head=head, tied_embeddings=False, mtp_layers=())
