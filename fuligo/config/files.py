"""Config files: YAML with the flags' names under their groups. Written in full, read strictly, with line numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from fuligo.config import Config
from fuligo.config.assignments import Assignment, Given, anchored, anchored_path, build_config, invalid_value
from fuligo.config.flag import Flag, Kind, did_you_mean, nearest
from fuligo.config.flags import flags, groups, passthrough_flags, passthrough_groups, sections
from fuligo.config.passthrough import deprecation, problem_with_name, resolved_value
from fuligo.config.schemas import schema
from fuligo.config.topology_file import LOADER, read_topology, topology_of

_HEADER = "# Every flag of this run with the value in force. To run it again: fuligo train --config {name} --run-dir NEW\n"


class _Dumper(yaml.SafeDumper):
    """PyYAML writes Unicode's line separators in a way that it reads back as spaces; quoted twice they are escaped."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    odd = any(separator in text for separator in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else None)


_Dumper.add_representer(str, _text_node)


def save_yaml(config: Config, path: Path) -> None:
    """Write the whole config, defaults included; `load_yaml` gives an equal one. The file appears at once or not at all."""
    text = yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(_HEADER.format(name=path.name) + text, encoding="utf-8")
    unfinished.replace(path)


def load_yaml(path: Path) -> Config:
    """The config of a file; what it does not name has its default.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds unknown, misplaced or invalid keys, all of them at once.
    """
    given = read_yaml(path)
    return build_config(given.assignments, given.problems)


def read_yaml(path: Path) -> Given:
    """What a file says; never raises."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), LOADER)
    except (OSError, UnicodeDecodeError) as error:
        return Given(problems=[f"--config {path}: cannot be read ({getattr(error, 'strerror', None) or error})"])
    except (yaml.YAMLError, RecursionError) as error:
        return Given(problems=[f"--config {path}: not valid YAML: {' '.join(str(error).split())}"])
    if root is None:
        return Given()
    if not isinstance(root, yaml.MappingNode):
        return Given(problems=[f"--config {path}: must hold groups of flags, such as `rollout: {{rollout_batch_size: 32}}`"])
    reader = _Reader(path)
    reader.read(root)
    return reader.given


class _Reader:
    """Walks the nodes of one file; knows the line of everything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.given = Given()
        self.problems = self.given.problems
        self.construct = SafeConstructor().construct_document

    def read(self, root: yaml.MappingNode) -> None:
        for group, node, place in self._entries(root):
            if group not in sections():
                self.problems.append(f"{place}: {_unknown_group(group)}")
            elif isinstance(node, yaml.MappingNode):
                read = self._passed_on if group in passthrough_groups() else self._typed
                self.given.assignments += read(group, node)
            elif self.construct(node) is not None:
                self.problems.append(f"{place}: {group} must hold flags, such as `{group}: {{{_first_flag(group)}: ...}}`")

    def _typed(self, group: str, node: yaml.MappingNode) -> Iterator[Assignment]:
        for name, value_node, place in self._entries(node):
            flag = flags().get(name)
            origin = f"{place}, {group}.{name}"
            if flag is None:
                self.problems.append(f"{place}: unknown key {name} in {group}{_suggest_keys(name)}")
            elif flag.group != group:
                self.problems.append(f"{place}: {name} belongs in the group {flag.group}, not in {group}")
            elif flag.kind is Kind.TOPOLOGY:
                yield from self._topology(flag, value_node, origin)
            else:
                yield from self._value(flag, value_node, origin)

    def _value(self, flag: Flag, node: yaml.Node, origin: str) -> Iterator[Assignment]:
        constructed = self._constructed(node, origin)
        if constructed is None:
            return
        (value,) = constructed
        if _bool_where_none_belongs(flag, value):
            self.problems.append(invalid_value(flag, value, origin))
        else:
            yield Assignment(flag, anchored(flag, value, self.path.parent), origin)

    def _topology(self, flag: Flag, node: yaml.Node, origin: str) -> Iterator[Assignment]:
        if isinstance(node, yaml.SequenceNode):
            topology = topology_of(node, self.path)
        else:
            constructed = self._constructed(node, origin)
            if constructed is None:
                return
            (value,) = constructed
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
        for name, value_node, place in self._entries(node):
            origin = f"{place}, {group}.{name}"
            problem = problem_with_name(backend, name)
            constructed = self._constructed(value_node, origin) if problem is None else None
            if constructed is None:
                self.problems += [f"{origin}: {problem}"] if problem else []
                continue
            alias = backend.aliases.get(name)
            flag = backend.flags[alias.name if alias else name]
            if flag.name in seen:
                self.problems.append(f"{origin}: the same is already given as {seen[flag.name]}")
                continue
            seen[flag.name] = name
            warning = deprecation(backend, name, str)
            self.given.warnings += [f"{place}: {warning}"] if warning else []
            (value,) = constructed
            try:
                given = None if value is None else resolved_value(backend, alias.value if alias else None, flag.name, value)
                yield Assignment(flag, given, origin)
            except ValueError as error:
                self.problems.append(f"{origin}: {error}")

    def _constructed(self, node: yaml.Node, origin: str) -> tuple[Any] | None:
        """The value of a node; None, and a problem, where it has none."""
        try:
            return (self.construct(node),)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.problems.append(f"{origin}: {' '.join(str(error).split())}")
            return None

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, str]]:
        """Key, value node and place of each entry; a key given twice is a problem (YAML has no order to decide by)."""
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value)
            if key in seen:
                self.problems.append(f"{self.path} line {line}: {key} is already given in line {seen[key]}")
                continue
            seen[key] = line
            yield key, value_node, f"{self.path} line {line}"


def _plain(config: Config) -> dict[str, Any]:
    """What YAML can hold; paths mean the same when they are read from another directory."""
    plain = config.model_dump(mode="json")
    for flag in flags().values():
        plain[flag.group][flag.name] = anchored(flag, plain[flag.group][flag.name], Path())
    return plain


def _bool_where_none_belongs(flag: Flag, value: Any) -> bool:
    """YAML's `yes` is true, and pydantic takes true for 1 and 1 for true: neither is meant."""
    if flag.kind is Kind.BOOL:
        return not isinstance(value, bool)
    values = value if flag.kind.is_list and isinstance(value, list) else [value]
    return any(isinstance(item, bool) for item in values)


def _first_flag(group: str) -> str:
    return next(iter(groups()[group].model_fields if group in groups() else passthrough_flags(group)))


def _unknown_group(group: str) -> str:
    flag = flags().get(group.replace("-", "_"))
    if flag is not None:
        return f"{flag.name} belongs in a group: `{flag.group}: {{{flag.name}: ...}}`"
    return f"unknown group {group}{did_you_mean(nearest(group, sections())) or '; the groups are ' + ', '.join(sections())}"


def _suggest_keys(name: str) -> str:
    names = nearest(name.replace("-", "_"), flags())
    return did_you_mean(f"{near} (group {flags()[near].group})" for near in names)
