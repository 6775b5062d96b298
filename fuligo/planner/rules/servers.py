"""The groups of engines that rules look at, where their values were given, and how those are changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fuligo.config import Config
from fuligo.config.findings import Change
from fuligo.config.flags import option_name
from fuligo.config.topology import EngineGroupSpec, engine_groups
from fuligo.planner.rules.rule import Fix
from fuligo.planner.subject import Subject

_latest: list[tuple[Config, tuple[EngineGroupSpec, ...]]] = []
"""The groups of the config that was asked for last: dozens of rules ask for the same."""


def all_groups(subject: Subject) -> tuple[EngineGroupSpec, ...]:
    """Every group, placeholders included."""
    for config, groups in _latest:
        if config is subject.config:
            return groups
    groups = engine_groups(subject.config)
    _latest[:] = [(subject.config, groups)]
    return groups


def running(subject: Subject) -> list[EngineGroupSpec]:
    """Groups with engines."""
    return [spec for spec in all_groups(subject) if spec.num_engines and spec.worker_type != "placeholder"]


def serving_policy(subject: Subject) -> list[EngineGroupSpec]:
    """Groups whose engines serve the model that is trained: its shapes are known."""
    return [spec for spec in running(subject) if spec.update_weights or spec.model_path == subject.config.model.hf_checkpoint]


def where(spec: EngineGroupSpec) -> str:
    """` (model default, group 2)`, or nothing where there is one group."""
    return "" if spec.place is None else f" (model {spec.model}, group {spec.place[1] + 1})"


def shown(spec: EngineGroupSpec, name: str, value: object = None) -> str:
    """An argument as typed: `--sglang-dp-size 3`; the value is that of the group where none is given."""
    value = spec.arguments.value(name) if value is None else value
    return option(name) if value is True else f"{option(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def option(name: str) -> str:
    """`dp_size` -> `--sglang-dp-size`."""
    return option_name(f"sglang_{name}")


def put_argument(subject: Subject, spec: EngineGroupSpec, name: str, value: Any) -> Change:
    """The change of an argument: in the group's overrides where it stands there, else of `--sglang-*`; None takes it away."""
    if spec.place is not None:
        model, group = spec.place
        topology = subject.config.engine.sglang_config
        assert topology is not None
        if name in topology[model].server_groups[group].overrides:
            return Change(("engine", "sglang_config", model, "server_groups", group, "overrides", name), value)
    return Change(("sglang", name), value)


def put_gpus_per_engine(subject: Subject, spec: EngineGroupSpec, value: int) -> Change:
    """The change of the size of an engine, where it was given."""
    if spec.place is not None:
        model, group = spec.place
        topology = subject.config.engine.sglang_config
        assert topology is not None
        if topology[model].server_groups[group].num_gpus_per_engine is not None:
            return Change(("engine", "sglang_config", model, "server_groups", group, "num_gpus_per_engine"), value)
        if topology[model].num_gpus_per_engine is not None:
            return Change(("engine", "sglang_config", model, "num_gpus_per_engine"), value)
    return Change(("cluster", "rollout_num_gpus_per_engine"), value)


def resizes(subject: Subject, spec: EngineGroupSpec, sizes: Iterable[int]) -> Iterator[Fix]:
    """Fixes that give an engine other sizes: alone, and with attention replicas and experts spread in the same proportion."""
    experts = subject.rollout_architecture.experts
    for size in sizes:
        engine = put_gpus_per_engine(subject, spec, size)
        yield (engine,)
        scaled = {name: spec.arguments.value(name) * size / spec.num_gpus_per_engine for name in ("dp_size", "ep_size")}
        given = {name: value for name, value in scaled.items() if spec.arguments.value(name) > 1}
        if not given or any(value != int(value) for value in given.values()):
            continue
        spread = [put_argument(subject, spec, name, int(value)) for name, value in given.items()]
        if experts is not None and spec.arguments.value("ep_num_redundant_experts"):
            copies = -experts.num_experts % int(given.get("ep_size", 1))
            spread.append(put_argument(subject, spec, "ep_num_redundant_experts", copies or None))
        yield (engine, *spread)


def engine_size(subject: Subject, spec: EngineGroupSpec) -> str:
    """The size of an engine as it was given: `--rollout-num-gpus-per-engine 24`, `num_gpus_per_engine 24 (model default, group 1)`."""
    in_topology = put_gpus_per_engine(subject, spec, 1).path[0] == "engine"
    name = f"num_gpus_per_engine {spec.num_gpus_per_engine}{where(spec)} of --sglang-config" if in_topology else ""
    return name or f"--rollout-num-gpus-per-engine {spec.num_gpus_per_engine}"
