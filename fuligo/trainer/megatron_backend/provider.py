"""Hook `--custom-model-provider-path`: `(pre_process, post_process, vp_stage=None) -> PolicyModel`.

A provider may change what the model computes, but not the names and shapes of its weights, so that loading, saving and weight sync work
unchanged.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn

from fuligo.config.hooks import load_hook
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.weights.local import local_weights, rank_groups

FLAG = "custom_model_provider_path"
_OPTION = "--custom-model-provider-path"
_NUM_LISTED = 3

M = TypeVar("M", bound=GPTModel)
_default: ContextVar[Callable[[bool, bool, int | None], GPTModel]] = ContextVar("default_model")


def default_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
    """Build the stage that fuligo uses without a provider: a `PolicyModel` on the device, with random weights.

    Call it inside a provider with the provider's arguments, and modify the result. Its `config` is Megatron's configuration of the model.
    """
    return _default.get()(pre_process, post_process, vp_stage)


def provided_model(
    path: str,
    build_default: Callable[[bool, bool, int | None], M],
    kind: type[M],
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> M:
    """Call the provider at `path`, check its result and return it.

    Args:
        build_default: function that `default_model` calls while the provider runs.
        pre_process: the stage has the embedding.
        post_process: the stage has the final norm, the head and the MTP layers.
        vp_stage: index of the stage among the rank's interleaved stages; None if the rank has one stage.

    Raises:
        ConfigError: the provider cannot be imported, or returns another kind of model or another stage.
    """
    provider = load_hook(FLAG, path)
    token = _default.set(build_default)
    try:
        model = provider(pre_process, post_process, vp_stage=vp_stage)
    finally:
        _default.reset(token)
    if not isinstance(model, kind):
        raise ConfigError(
            f"{_OPTION} {path} returns an object of type {type(model).__name__}; it must return a {kind.__name__}: the "
            f"(modified) result of {__name__}.default_model, or an instance of a subclass"
        )
    for name, asked in {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}.items():
        if getattr(model, name) != asked:
            raise ConfigError(
                f"{_OPTION} {path} returns a stage with {name}={getattr(model, name)} instead of {asked}; pass the argument on to the model"
            )
    return model


def require_weights(path: str, chunks: Sequence[nn.Module], settings: MegatronTrainerSettings) -> None:
    """Check that all pipeline stages together have exactly the weights of the model in config.json. A collective.

    Raises ConfigError, on every rank of the pipeline, if a weight is missing or unknown.
    """
    names = names_of(read_config_json(settings.hf_checkpoint), str(settings.hf_checkpoint / "config.json"))
    pipeline, held = rank_groups().pipeline, list(local_weights(chunks))
    of_stages: list[list[str]] = [[] for _ in range(pipeline.size())]
    dist.all_gather_object(of_stages, held, group=pipeline)
    there = {name for stage in of_stages for name in stage}
    experts = {weight.expert for name in there if (weight := names.by_megatron_name.get(name)) is not None}
    wanted = [weight.megatron for weight in names.weights(settings.num_mtp_layers) if weight.expert in experts | {None}]
    for problem, found in {
        "has weights that are not in the checkpoint": sorted(there - names.by_megatron_name.keys()),
        "lacks weights of the checkpoint": [name for name in wanted if name not in there],
    }.items():
        if found:
            more = f" and {len(found) - _NUM_LISTED} more" if len(found) > _NUM_LISTED else ""
            raise ConfigError(
                f"{_OPTION} {path}: the model {problem}: {', '.join(found[:_NUM_LISTED])}{more}; "
                "give the provider's modules weights of the same names and shapes"
            )
