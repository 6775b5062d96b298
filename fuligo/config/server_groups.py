"""Groups of SGLang servers as `--sglang-config` describes them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fuligo.config.passthrough import SglangArguments

WorkerType = Literal["regular", "prefill", "decode", "placeholder"]
"""Role of an engine: prefill and decode (regular), or one of the two. A placeholder keeps GPUs free."""

TEACHER = "teacher"
"""Name of the model of `--sglang-config` that serves as the teacher (--use-opd)."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


Count = Annotated[int, Field(ge=1, strict=True)]


class ServerGroup(_Entry):
    """Engines of one role."""

    worker_type: WorkerType = "regular"
    num_gpus: Annotated[int, Field(ge=0, strict=True)]
    """GPUs of all engines of the group."""
    num_gpus_per_engine: Count | None = None
    """GPUs per engine; None: as for the model."""
    overrides: SglangArguments = SglangArguments()
    """Arguments of SGLang for this group, which override `--sglang-*`."""


class ModelServers(_Entry):
    """Engines of one model, behind one router."""

    name: str = "default"
    model_path: str | None = None
    """Path of the model; None: `--hf-checkpoint`."""
    update_weights: Annotated[bool, Field(strict=True)] | None = None
    """True if the engines receive the trainer's weights; None: they do if the model path is the policy's."""
    num_gpus_per_engine: Count | None = None
    """GPUs per engine; None: `--rollout-num-gpus-per-engine`."""
    server_groups: Annotated[list[ServerGroup], Field(min_length=1)]
