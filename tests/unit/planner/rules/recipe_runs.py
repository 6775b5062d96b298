"""Recipes of `examples/` with changes, as subjects of the planner."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fuligo.config.changes import apply_changes
from fuligo.config.command_line import parse
from fuligo.config.findings import Change
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.architecture import Architecture, PartKind
from fuligo.models.config_json import ConfigJson
from fuligo.models.parts import vector
from fuligo.planner.subject import Subject, read_subject

EXAMPLES = Path(__file__).parents[4] / "examples"

DENSE = "glm4-9b/colocated.yaml"
"""8 shared GPUs, 32 heads, 40 layers; TP 2, CP 2; engines of 2."""
SEPARATE = "glm4-9b/separate.yaml"
"""4 GPUs for the trainer and 4 for engines of 2."""
DRAFTS = "mimo-7b/config.yaml"
"""8 shared GPUs, 36 layers and one for prediction; engines of 1 with EAGLE."""
MIXTURE = "glm4.7-flash/8gpus.yaml"
"""8 shared GPUs, 20 heads with latent attention, 64 experts, 47 layers; EP 8; one engine of 8 with 8 attention replicas."""
REDUNDANT = "glm4.7-flash/24gpus.yaml"
"""24 shared GPUs, the same model; one engine of 24 with 6 attention replicas and 8 redundant experts."""
LARGE = "glm4.5-355b/bf16.yaml"
"""64 shared GPUs, 96 heads, 160 experts, 92 layers; TP 8, PP 4, CP 2, EP 16; engines of 32."""
FP8 = "glm4.5-355b/fp8.yaml"
"""MIXTURE, sampled in FP8 with DeepEP over 32 expert ranks."""
SPARSE = "glm5.2-744b/config.yaml"
"""256 shared GPUs, 78 layers with sparse attention; PP 8; prefill and decode engines of 64 with DeepEP and EAGLE."""
TOWERS = "gemma4-26b/config.yaml"
"""8 shared GPUs (H200), a mixture with a vision tower; the torch trainer, engines of 2."""
TOWER = vector(PartKind.VISION_TOWER, 400_000_000)
ON_CPU = "calculator/config.yaml"
"""The torch trainer and the embedded engine on a CPU, with a tiny dense model."""
EXACT_ON_TWO = (
    "--exact-on-policy --device cuda --rollout-backend sglang --colocate --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 "
    "--sglang-mem-fraction-static 0.7"
)
"""Flags with which it runs on 2 GPUs."""
FP8_WHOLE = (
    "--fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 1 --no-sequence-parallel --context-parallel-size 1 "
    "--max-tokens-per-gpu 9216"
)
"""Training in FP8 with the whole model on each GPU."""


_GROUPS = ("engine", "sglang_config", 0, "server_groups")


@dataclass(frozen=True, slots=True)
class Run:
    """Recipe with other flags, and with another model if flags alone cannot violate the rule."""

    recipe: str
    flags: str = ""
    """Flags as typed."""
    changes: tuple[Change, ...] = ()
    """Changes that have no flag: engine groups."""
    trainer_model: Mapping[str, Any] = field(default_factory=dict)
    engine_model: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    config_json: Mapping[str, Any] | None = None
    """Changes of the trained model's config.json."""
    teacher: str | None = None
    """Directory in `examples/` of the trainer's teacher, for rules on its config.json."""
    gpu: str = "h100-80"

    def subject(self) -> Subject:
        """Return the planner's subject."""
        # Which dispatcher a recipe with experts has is not what is tested here.
        dispatcher = "--moe-token-dispatcher-type alltoall " if "glm4.7" in self.recipe else ""
        config = parse(["--config", str(EXAMPLES / self.recipe), *shlex.split(dispatcher + self.flags)]).config
        subject = read_subject(apply_changes(config, self.changes) if self.changes else config, self.gpu)
        if self.quantization is not None:
            assert subject.engine_config_json is not None
            values = {**subject.engine_config_json.values, "quantization_config": self.quantization}
            subject = replace(subject, engine_config_json=replace(subject.engine_config_json, values=values))
        if self.config_json is not None:
            assert subject.trainer_config_json is not None
            values = {**subject.trainer_config_json.values, **self.config_json}
            subject = replace(subject, trainer_config_json=replace(subject.trainer_config_json, values=values))
        if self.teacher is not None:
            file = EXAMPLES / self.teacher / "config.json"
            subject = replace(subject, teacher_config_json=ConfigJson(read_config_json(file), str(file)))
        return replace(
            subject,
            architecture=_with(subject.architecture, self.trainer_model),
            rollout_architecture=_with(subject.rollout_architecture, self.engine_model),
        )


def _with(architecture: Architecture, facts: Mapping[str, Any]) -> Architecture:
    """Replace facts of the model, its attention (`attention.num_heads`) or its experts."""
    for name, value in facts.items():
        part, _, inner = name.rpartition(".")
        architecture = replace(architecture, **{part: replace(getattr(architecture, part), **{inner: value})} if part else {inner: value})
    return architecture


def group(number: int, name: str, value: Any) -> Change:
    """Return the change of an engine group."""
    return Change((*_GROUPS, number, *name.split(".")), value)
