"""Engine groups for the rules: lookup, display and change of their arguments."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, Severity, Violation
from fuligo.config.flags import option_name
from fuligo.config.topology import EngineGroupSpec, engine_groups
from fuligo.planner.rules.rule import Fix
from fuligo.planner.subject import Subject

_latest: list[tuple[Config, tuple[EngineGroupSpec, ...]]] = []
"""Cache of the last config's groups, since dozens of rules read the same config."""


def all_groups(subject: Subject) -> tuple[EngineGroupSpec, ...]:
    """Return every group, placeholders included."""
    for config, groups in _latest:
        if config is subject.config:
            return groups
    groups = engine_groups(subject.config)
    _latest[:] = [(subject.config, groups)]
    return groups


def running(subject: Subject) -> list[EngineGroupSpec]:
    """Return the groups with engines; a placeholder has none."""
    return [spec for spec in all_groups(subject) if spec.num_engines]


def serving_policy(subject: Subject) -> list[EngineGroupSpec]:
    """Return the groups whose engines serve the trained model."""
    return [spec for spec in running(subject) if spec.update_weights or spec.model_path == subject.config.model.hf_checkpoint]


def group_rule(
    rule_id: str,
    *options: str,
    severity: Severity = Severity.ERROR,
    groups: Callable[[Subject], Iterable[EngineGroupSpec]] = serving_policy,
) -> Callable[[Callable[[Subject, EngineGroupSpec], Iterator[Violation[Fix]]]], Rule[Subject, Fix]]:
    """Return a decorator that turns a check of one group into a rule on all `groups`."""

    def decorate(check: Callable[[Subject, EngineGroupSpec], Iterator[Violation[Fix]]]) -> Rule[Subject, Fix]:
        def check_all(subject: Subject) -> Iterator[Violation[Fix]]:
            for spec in groups(subject):
                yield from check(subject, spec)

        check_all.__doc__ = check.__doc__
        return Rule(rule_id, severity, options, check_all)

    return decorate


def where(spec: EngineGroupSpec) -> str:
    """Return ` (model default, group 2)`; an empty string without `--sglang-config`."""
    return "" if spec.place is None else f" (model {spec.model}, group {spec.place[1] + 1})"


def shown(spec: EngineGroupSpec, name: str, value: object = None) -> str:
    """Return an argument as typed, such as `--sglang-dp-size 3`; `value` defaults to the group's."""
    value = spec.arguments.value(name) if value is None else value
    return option(name) if value is True else f"{option(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def placed(spec: EngineGroupSpec, name: str, value: object = None) -> str:
    """Return an argument as typed, with its group, such as `--sglang-dp-size 3 (model default, group 2)`."""
    return f"{shown(spec, name, value)}{where(spec)}"


def option(name: str) -> str:
    """Return the option of an argument: `dp_size` -> `--sglang-dp-size`."""
    return option_name(f"sglang_{name}")


def set_argument(subject: Subject, spec: EngineGroupSpec, name: str, value: Any) -> Change:
    """Return the change of an argument, in the group's overrides if given there, else as `--sglang-*`; None unsets it."""
    if spec.place is not None:
        model, group = spec.place
        topology = subject.config.engine.sglang_config
        assert topology is not None
        if name in topology[model].server_groups[group].overrides:
            return Change(("engine", "sglang_config", model, "server_groups", group, "overrides", name), value)
    return Change(("sglang", name), value)


def set_each(subject: Subject, spec: EngineGroupSpec, name: str, *values: Any) -> tuple[Fix, ...]:
    """Return alternative fixes, each of which sets an argument to one of the values."""
    return tuple((set_argument(subject, spec, name, value),) for value in values)


def set_gpus_per_engine(subject: Subject, spec: EngineGroupSpec, value: int) -> Change:
    """Return the change that sets an engine's number of GPUs where the config gives it."""
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
    """Yield fixes that resize an engine: alone, and with attention replicas and expert ranks in proportion."""
    experts = subject.rollout_architecture.experts
    for size in sizes:
        engine = set_gpus_per_engine(subject, spec, size)
        yield (engine,)
        scaled = {name: spec.arguments.value(name) * size / spec.num_gpus_per_engine for name in ("dp_size", "ep_size")}
        given = {name: value for name, value in scaled.items() if spec.arguments.value(name) > 1}
        if not given or any(value != int(value) for value in given.values()):
            continue
        spread = [set_argument(subject, spec, name, int(value)) for name, value in given.items()]
        if experts is not None and spec.arguments.value("ep_num_redundant_experts"):
            copies = -experts.num_experts % int(given.get("ep_size", 1))
            spread.append(set_argument(subject, spec, "ep_num_redundant_experts", copies or None))
        yield (engine, *spread)


def engine_size(subject: Subject, spec: EngineGroupSpec) -> str:
    """Return the size of an engine as given, such as `--rollout-num-gpus-per-engine 24`."""
    in_topology = set_gpus_per_engine(subject, spec, 1).path[0] == "engine"
    name = f"num_gpus_per_engine {spec.num_gpus_per_engine}{where(spec)} of --sglang-config" if in_topology else ""
    return name or f"--rollout-num-gpus-per-engine {spec.num_gpus_per_engine}"
