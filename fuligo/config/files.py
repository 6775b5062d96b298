"""Reader and writer of config files: YAML with flag names under their groups, read strictly and with line numbers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fuligo.config import Config
from fuligo.config.assignments import Assignment, Given, anchored, anchored_path, invalid_value
from fuligo.config.flag import Flag, Kind, did_you_mean, nearest
from fuligo.config.flags import flags, name_problem, passthrough_flags, sections
from fuligo.config.groups import GROUPS
from fuligo.config.other_frameworks import GROUPS_OF_VERL, elsewhere
from fuligo.config.passthrough import deprecation, resolved_value
from fuligo.config.schemas import BACKENDS, schema
from fuligo.config.topology_file import read_topology, topology_of
from fuligo.config.yaml_text import compose, construct, entries, read_yaml_text, yaml_problem

_HEADER = "# Every flag of this run with its final value. Run it again with: fuligo train --config {name} --run-dir NEW\n"
_HEADER_SECRETS = "# Keys and passwords are not written: ${{NAME}} is taken from the environment of the command. Set {names}.\n"


class _Dumper(yaml.SafeDumper):
    """YAML dumper that escapes Unicode line separators, which PyYAML would read back as spaces."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    odd = any(separator in text for separator in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else None)


_Dumper.add_representer(str, _text_node)


def save_yaml(config: Config, path: Path) -> None:
    """Write the whole config atomically, defaults included; reading it gives an equal one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(yaml_text(config, path.name), encoding="utf-8")
    unfinished.replace(path)


def yaml_text(config: Config, name: str = "FILE") -> str:
    """Return the text of the config file `name` with the whole config, defaults included."""
    plain = config.model_dump(mode="json")
    for flag in flags().values():  # so that paths mean the same when read from another directory
        plain[flag.group][flag.name] = anchored(flag, plain[flag.group][flag.name], Path())
    text = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    names = ", ".join(sorted({secret.variable for _, secret in config.secrets()}))
    header = _HEADER.format(name=name) + (_HEADER_SECRETS.format(names=names) if names else "")
    return header + text


def read_yaml(path: Path) -> Given:
    """Read the assignments of a file. Never raises: errors are in `problems`."""
    try:
        root = compose(read_yaml_text(path))
    except (OSError, ValueError) as error:
        return Given(problems=[f"cannot read --config {path}: {getattr(error, 'strerror', None) or error}"])
    except yaml.YAMLError as error:
        return Given(problems=[f"--config {path} is not valid YAML: {yaml_problem(error)}"])
    if root is None:
        return Given()
    if not isinstance(root, yaml.MappingNode):
        return Given(problems=[f"--config {path} must hold groups of flags, such as `rollout: {{rollout_batch_size: 32}}`"])
    reader = _Reader(path)
    reader.read(root)
    return reader.given


class _Reader:
    """Reader of one file, which tracks the line of every node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.given = Given()
        self.problems = self.given.problems

    def read(self, root: yaml.MappingNode) -> None:
        for group, node, place in entries(root, self.path, self.problems):
            if group in GROUPS_OF_VERL and isinstance(node, yaml.MappingNode):
                self.problems += (f"{self.path} line {line}: unknown key {name}{elsewhere(name)}" for name, line in _leaves(group, node))
            elif group not in sections():
                self.problems.append(f"{place}: {_unknown_group(group)}")
            elif isinstance(node, yaml.MappingNode):
                read = self._passed_on if group in BACKENDS else self._typed
                self.given.assignments += read(group, node)
            elif node.tag != "tag:yaml.org,2002:null":
                first = next(iter(GROUPS[group].model_fields if group in GROUPS else passthrough_flags(group)))
                self.problems.append(f"{place}: {group} must hold flags, such as `{group}: {{{first}: ...}}`")

    def _typed(self, group: str, node: yaml.MappingNode) -> Iterator[Assignment]:
        for name, value_node, place in entries(node, self.path, self.problems):
            flag = flags().get(name)
            origin = f"{place}, {group}.{name}"
            if flag is None:
                near = (f"{key} (group {flags()[key].group})" for key in nearest(name.replace("-", "_"), flags()))
                self.problems.append(f"{place}: unknown key {name} in {group}{elsewhere(name) or did_you_mean(near)}")
            elif flag.group != group:
                self.problems.append(f"{place}: {name} belongs in the group {flag.group}, not in {group}")
            else:
                read = self._topology if flag.kind is Kind.TOPOLOGY else self._value
                try:
                    yield from read(flag, value_node, origin)
                except yaml.YAMLError as error:
                    self.problems.append(f"{origin}: {yaml_problem(error)}")

    def _value(self, flag: Flag, node: yaml.Node, origin: str) -> Iterator[Assignment]:
        value = construct(node)
        if _has_misplaced_bool(flag, value):
            self.problems.append(invalid_value(flag, value, origin))
        else:
            yield Assignment(flag, anchored(flag, value, self.path.parent), origin)

    def _topology(self, flag: Flag, node: yaml.Node, origin: str) -> Iterator[Assignment]:
        if isinstance(node, yaml.SequenceNode):
            topology = topology_of(node, self.path)
        else:
            value = construct(node)
            if value is None:
                yield Assignment(flag, None, origin)
                return
            if not isinstance(value, str):
                self.problems.append(f"{origin}: must be {flag.kind}, or the list of models that such a file holds")
                return
            topology = read_topology(Path(anchored_path(value, self.path.parent)))
        self.problems += topology.problems
        self.given.warnings += topology.warnings
        if not topology.problems:
            yield Assignment(flag, topology.models, origin)

    def _passed_on(self, group: str, node: yaml.MappingNode) -> Iterator[Assignment]:
        backend = schema(group)
        seen: dict[str, str] = {}
        for name, value_node, place in entries(node, self.path, self.problems):
            origin = f"{place}, {group}.{name}"
            if (problem := name_problem(backend, name)) is not None:
                self.problems.append(f"{origin}: {problem}")
                continue
            alias = backend.aliases.get(name)
            flag = backend.flags[alias.name if alias else name]
            if flag.name in seen:
                self.problems.append(f"{origin}: already given as {seen[flag.name]}")
                continue
            seen[flag.name] = name
            warning = deprecation(backend, name, str)
            self.given.warnings += [f"{place}: {warning}"] if warning else []
            try:
                value = construct(value_node)
                given = None if value is None else resolved_value(backend, alias.value if alias else None, flag.name, value)
                yield Assignment(flag, given, origin)
            except yaml.YAMLError as error:
                self.problems.append(f"{origin}: {yaml_problem(error)}")
            except ValueError as error:
                self.problems.append(f"{origin}: {error}")


def _has_misplaced_bool(flag: Flag, value: Any) -> bool:
    """Return True for a boolean where the flag takes none, or the reverse; pydantic would accept YAML's `yes` as 1."""
    if flag.kind is Kind.BOOL:
        return not isinstance(value, bool) and not (value is None and flag.optional)
    values = value if flag.kind.is_list and isinstance(value, list) else [value]
    return any(isinstance(item, bool) for item in values)


def _leaves(name: str, node: yaml.MappingNode) -> Iterator[tuple[str, int]]:
    """Yield dotted name and line of every value below a node: `trainer.nnodes`."""
    for key, value in node.value:
        inner = f"{name}.{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves(inner, value)
        else:
            yield inner, key.start_mark.line + 1


def _unknown_group(group: str) -> str:
    if (flag := flags().get(group.replace("-", "_"))) is not None:
        return f"{flag.name} belongs in a group: `{flag.group}: {{{flag.name}: ...}}`"
    if advice := elsewhere(group):
        return f"unknown key {group}{advice}"
    return f"unknown group {group}{did_you_mean(nearest(group, sections())) or '; the groups are ' + ', '.join(sections())}"
