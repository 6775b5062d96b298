"""`NAME=value`, `NAME+=value`, `NAME=(...)`, `NAME[i]=value`: the name and its new value."""

from __future__ import annotations

from tree_sitter import Node

from fuligo.importer import arithmetic, words
from fuligo.importer.state import Value
from fuligo.importer.syntax import line_of, text_of
from fuligo.importer.words import Evaluator


def assigned(shell: Evaluator, node: Node) -> tuple[str, Value]:
    """What an assignment makes of its variable; nothing is set yet.

    Raises:
        ConfigError: an element behind the end of its array, or a value that cannot be expanded.
    """
    target = node.child_by_field_name("name")
    assert target is not None
    value_node = node.child_by_field_name("value")
    appends = any(not child.is_named and text_of(child) == "+=" for child in node.children)
    if value_node is not None and value_node.type == "array":
        name = text_of(target)
        elements = words.fields(shell, [child for child in value_node.children if child.is_named and child.type != "comment"])
        before = shell.state.get(name) if appends else []
        return name, [*([before] if isinstance(before, str) else before or []), *elements]
    value = "" if value_node is None else words.text(shell, value_node)
    if target.type == "subscript":
        return _element(shell, target, value)
    name = text_of(target)
    before = shell.state.get(name) if appends else ""
    if isinstance(before, list):
        return name, [before[0] + value if before else value, *before[1:]]
    return name, (before or "") + value


def _element(shell: Evaluator, target: Node, value: str) -> tuple[str, Value]:
    name = text_of(target.children[0])
    index_node = target.child_by_field_name("index")
    assert index_node is not None
    index, before = arithmetic.evaluate(shell.state, index_node), shell.state.get(name)
    elements = [before] if isinstance(before, str) else list(before or [])
    if not 0 <= index <= len(elements):
        raise shell.state.error(line_of(target), f"{name}[{index}] is behind the end of {name}, which has {len(elements)} elements")
    return name, [*elements[:index], value, *elements[index + 1 :]]
