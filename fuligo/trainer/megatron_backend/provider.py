"""`--custom-model-provider-path`: `(pre_process, post_process, vp_stage=None) -> PolicyModel`, and what it may call.

A provider changes what the model computes, not which weights it has: those are the checkpoint's, under the names and in the shapes of
fuligo's own model, so that loading, saving and weight sync stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fuligo.config.hooks import load_hook
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.groups import rank_groups
from fuligo.trainer.megatron_backend.weights.local import local_weights

if TYPE_CHECKING:
    from fuligo.trainer.megatron_backend.model import PolicyModel

FLAG = "custom_model_provider_path"
_OPTION = "--custom-model-provider-path"
_NUM_LISTED = 3

BuildStage = Callable[[bool, bool, int | None], "PolicyModel"]
_default: ContextVar[BuildStage] = ContextVar("default_model")


def default_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PolicyModel:
    """The stage as fuligo builds it without a provider, to be changed; on the device, with random weights.

    For use inside a provider, which passes its own arguments on. Megatron's configuration of the model is its `config`.
    """
    return _default.get()(pre_process, post_process, vp_stage)


def provided_model(
    path: str, build_default: BuildStage, kind: type[PolicyModel], pre_process: bool, post_process: bool, vp_stage: int | None
) -> PolicyModel:
    """What the provider at `path` returns.

    Args:
        build_default: what `default_model` is while it runs.
        kind: what it must return.
        pre_process: the stage has the embedding.
        post_process: it has the final norm, the head and the prediction layers.
        vp_stage: which of the rank's interleaved stages; None: it has one.

    Raises:
        ConfigError: it cannot be imported, or returns something else.
    """
    provider = load_hook(FLAG, path)
    token = _default.set(build_default)
    try:
        model = provider(pre_process, post_process, vp_stage=vp_stage)
    finally:
        _default.reset(token)
    if not isinstance(model, kind):
        raise ConfigError(
            f"{_OPTION} {path} returns a {type(model).__name__}; it must return a {kind.__name__}: what "
            f"{__name__}.default_model gives, changed, or one of a class derived from it"
        )
    for name, asked in {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}.items():
        if getattr(model, name) != asked:
            raise ConfigError(f"{_OPTION} {path} returns a stage with {name} {getattr(model, name)}, {asked} was asked for; pass it on")
    return model


def require_weights(path: str, chunks: Sequence[nn.Module], settings: MegatronTrainerSettings) -> None:
    """That the stages of all pipeline ranks together have the weights of the model that config.json describes. A collective.

    Raises:
        ConfigError: one is missing or unknown; on every rank of the pipeline.
    """
    names = names_of(read_config_json(settings.hf_checkpoint), str(settings.hf_checkpoint / "config.json"))
    pipeline, held = rank_groups().pipeline, list(local_weights(chunks))
    of_stages: list[list[str]] = [[] for _ in range(pipeline.size())]
    dist.all_gather_object(of_stages, held, group=pipeline)
    there = {name for stage in of_stages for name in stage}
    experts = {weight.expert for name in there if (weight := names.by_megatron_name.get(name)) is not None}
    wanted = [weight.megatron for weight in names.weights(settings.prediction.num_layers) if weight.expert in experts | {None}]
    for problem, found in {
        "has weights that the checkpoint has no place for": sorted(there - names.by_megatron_name.keys()),
        "lacks weights of the checkpoint": [name for name in wanted if name not in there],
    }.items():
        if found:
            more = f" and {len(found) - _NUM_LISTED} more" if len(found) > _NUM_LISTED else ""
            raise ConfigError(
                f"{_OPTION} {path}: the model {problem}: {', '.join(found[:_NUM_LISTED])}{more}; "
                "replace modules by others with weights of the same names and shapes"
            )
