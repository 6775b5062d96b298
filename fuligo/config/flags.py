"""Flags as data, shared by the command line, the config file, `--help` and docs/flags.md.

Typed flags are read from the fields of the groups. The groups `sglang`, `router` and `megatron` pass arguments on; their flags come
from the schemas.
"""

import functools
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fuligo.config.flag import Flag, Kind, did_you_mean, nearest, option_name
from fuligo.config.groups import GROUPS
from fuligo.config.schemas import BACKENDS, RESERVED, Schema, schema
from fuligo.config.secret import Url
from fuligo.config.server_groups import ModelServers

__all__ = [
    "Flag", "Kind", "did_you_mean", "flags", "name_problem", "nearest", "option_name", "passthrough_flags", "refusal", "sections",
    "suggest_options",
]  # fmt: skip

_MEGATRON = """
use_distributed_optimizer optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer mtp_num_layers
enable_mtp_training mtp_loss_scaling_factor mtp_joint_training use_routing_replay use_rollout_routing_replay override_model_config
custom_model_provider_path
"""
MEGATRON_FLAGS = (*GROUPS["parallel"].model_fields, *_MEGATRON.split())
"""Flags that choose the Megatron trainer; the whole group `megatron` does so too."""
MTP_FLAGS = ("mtp_num_layers", "enable_mtp_training", "mtp_loss_scaling_factor", "mtp_joint_training")
"""Flags among `MEGATRON_FLAGS` that the torch trainer also reads, with --train-backend torch."""
TORCH_FLAGS = ("gradient_checkpointing", "freeze_vision_tower")
"""Flags that the Megatron trainer rejects. It ignores `torch_compile`, which only switches an optimization of the torch trainer."""
SGLANG_FLAGS = ("rollout_num_gpus", "rollout_num_gpus_per_engine", "sglang_config")
"""Flags that only SGLang engines read, in addition to the groups `sglang` and `router`."""
EMBEDDED_FLAGS = ("embedded_max_running_requests", "embedded_max_total_tokens", "embedded_dtype", "embedded_num_threads")
"""Flags that only the embedded engine reads."""

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def sections() -> list[str]:
    """Return the names of all groups: the sections of a config file."""
    return [*GROUPS, *BACKENDS]


@functools.cache
def flags() -> dict[str, Flag]:
    """Return all typed flags by name. Names are unique across groups, so that the command line needs no prefix."""
    found: dict[str, Flag] = {}
    for group, model in GROUPS.items():
        for name, field in model.model_fields.items():
            assert name not in found, f"{name} is in {found[name].group} and in {group}"
            found[name] = _describe(name, group, field)
    return found


@functools.cache
def passthrough_flags(group: str) -> dict[str, Flag]:
    """Return the flags that a pass-through group accepts, by name without prefix."""
    typed = flags()
    given = schema(group).flags.items()
    return {name: flag for name, flag in given if name not in RESERVED[group] and flag.flat_name not in typed}


def name_problem(backend: Schema, name: str) -> str | None:
    """Return why an argument of this name cannot be given: it is refused or unknown. None if it can."""
    refused = refusal(backend, name)
    if refused is not None or backend.canonical(name) in backend.flags:
        return refused
    key = name.replace("-", "_")
    elsewhere = [flags()[key].group] if key in flags() else []
    elsewhere += [other for other in BACKENDS if other != backend.group and key in passthrough_flags(other)]
    return backend.unknown(name, [f"{key} (group {other})" for other in elsewhere])


def refusal(backend: Schema, name: str) -> str | None:
    """Return why a known name is refused and what to use instead; None if it is accepted or unknown."""
    canonical = backend.canonical(name)
    if backend.group == "megatron" and canonical in flags():
        return f"belongs in the group {flags()[canonical].group}, not in megatron"
    return backend.refusal(name)


def suggest_options(typed: str) -> str:
    """Return `; did you mean --lr (optimizer)?` with flags of a similar name, or of this name without prefix; an empty string if none."""
    name = typed.strip("-").replace("-", "_")
    return did_you_mean(f"{flag.option} ({flag.group})" for flag in _similar(name))


def _similar(name: str) -> list[Flag]:
    bare = name
    for group in BACKENDS:
        bare = bare.removeprefix(f"{group}_")
    exact = [flags()[bare]] if bare in flags() else []
    for group in BACKENDS:
        canonical = schema(group).canonical(bare)
        if canonical in passthrough_flags(group):
            exact.append(passthrough_flags(group)[canonical])
    if exact:
        return exact
    if prefixed := [group for group in BACKENDS if name.startswith(f"{group}_")]:
        prefix = f"{prefixed[0]}_"
        known = passthrough_flags(prefixed[0]) | {
            typed.removeprefix(prefix): flag for typed, flag in flags().items() if typed.startswith(prefix)
        }
        if found := [known[near] for near in nearest(bare, known)]:
            return found
    known = {flag.flat_name: flag for group in BACKENDS for flag in passthrough_flags(group).values()} | flags()
    return [known[near] for near in nearest(name, known)]


def _describe(name: str, group: str, field: FieldInfo) -> Flag:
    annotation, optional = _without_none(field.annotation)
    extra = field.json_schema_extra
    assert isinstance(extra, dict) and field.description, f"{name} is not declared by flag()"
    return Flag(
        name=name,
        group=group,
        kind=_kind(annotation),
        choices=tuple(get_args(annotation)) if get_origin(annotation) is Literal else (),
        optional=optional,
        bounds=" and ".join(f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in _BOUNDS.items() if hasattr(m, key)),
        default=field.default,
        doc=field.description,
        unit=extra["unit"],  # pyrefly: ignore[bad-argument-type]
        source=extra["source"],  # pyrefly: ignore[bad-argument-type]
        is_path=bool(extra["path"]),
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(annotation) if arg is not type(None))
        return inner, True
    return annotation, False


def _kind(annotation: Any) -> Kind:
    if get_origin(annotation) is Literal:
        return Kind.CHOICE
    kinds = {
        bool: Kind.BOOL,
        int: Kind.INT,
        float: Kind.FLOAT,
        str: Kind.TEXT,
        Url: Kind.TEXT,
        list[str]: Kind.TEXT_LIST,
        list[int]: Kind.INT_LIST,
        list[float]: Kind.FLOAT_LIST,
    }
    if annotation == list[ModelServers]:
        return Kind.TOPOLOGY
    return kinds.get(annotation, Kind.JSON)
