"""`${...}`: defaults, lengths, cut and replaced parts, slices of arrays."""

from __future__ import annotations

from dataclasses import replace

from tree_sitter import Node

from fuligo.importer import arithmetic, words
from fuligo.importer.patterns import Pattern, PatternError, ends, glob_pattern, search
from fuligo.importer.state import Value
from fuligo.importer.syntax import line_of, text_of
from fuligo.importer.words import Evaluator, Piece

_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")
_CUTS = ("#", "##", "%", "%%")
_REPLACEMENTS = ("/", "//", "/#", "/%")
_CASES = {"^": lambda t: t[:1].upper() + t[1:], "^^": str.upper, ",": lambda t: t[:1].lower() + t[1:], ",,": str.lower}


def expand(shell: Evaluator, node: Node, quoted: bool, unset_is_empty: bool) -> Value | tuple[Piece, ...]:
    """The value of one `${...}`: a text, the elements of an array, or the pieces of a default.

    Raises:
        ConfigError: an unset variable without a default, or a form that is not understood.
    """
    parts = node.children[1:-1]
    prefix = ""
    if parts and not parts[0].is_named and text_of(parts[0]) in ("#", "!"):
        prefix, parts = text_of(parts[0]), parts[1:]
    if not parts or parts[0].type not in ("variable_name", "special_variable_name", "subscript"):
        raise _not_understood(shell, node)
    operand = parts[0]
    name, value, is_array = _variable(shell, operand)
    operator = text_of(parts[1]) if len(parts) > 1 else ""
    if operator in _DEFAULTS and not prefix:
        return _default(shell, node, name, value, operator, parts, quoted)
    if value is None and is_array:
        shell.state.note(line_of(node), f"{name} is not set, {text_of(node)} gives nothing")
        value = []
    if value is None and unset_is_empty:
        shell.state.findings.tested_unset[name] = None
        value = ""
    if value is None:
        raise shell.state.unset_error(line_of(node), name)
    if prefix:
        return _prefixed(shell, node, prefix, value, is_array, bool(operator))
    if operator:
        if operator == ":" and name in ("@", "*"):
            value = [str(shell.state.sources[0]), *value]  # counted from $0
        value = _changed(shell, node, value, operator, parts[2:])
    if isinstance(value, list) and operand.type == "subscript" and _subscript(operand) == "*" and quoted:
        return words.joined(shell, value)
    return value if is_array or isinstance(value, str) else (value[0] if value else "")


def _variable(shell: Evaluator, operand: Node) -> tuple[str, Value | None, bool]:
    """Name, value, and whether all elements of an array are meant."""
    if operand.type != "subscript":
        name = text_of(operand)
        value = words.parameter(shell, name)
        if isinstance(value, list) and name not in ("@", "*"):
            value = value[0] if value else None
        return name, value, name in ("@", "*")
    name, subscript = text_of(operand.children[0]), _subscript(operand)
    value = shell.state.get(name)
    if subscript in ("@", "*"):
        return name, [value] if isinstance(value, str) else value, True
    elements = [] if value is None else value if isinstance(value, list) else [value]
    index_node = operand.child_by_field_name("index")
    index = 0 if index_node is None else arithmetic.evaluate(shell.state, index_node)
    found = elements[index] if -len(elements) <= index < len(elements) else None
    return f"{name}[{index}]", found, False


def _subscript(operand: Node) -> str:
    index = operand.child_by_field_name("index")
    return "" if index is None else text_of(index)


def _default(
    shell: Evaluator, node: Node, name: str, value: Value | None, operator: str, parts: list[Node], quoted: bool
) -> Value | tuple[Piece, ...]:
    is_missing = value is None or (operator.startswith(":") and value in ("", []))
    if operator.endswith("+"):
        return () if is_missing else _operand(shell, node, parts, quoted)
    if not is_missing:
        assert value is not None
        return value
    given = _operand(shell, node, parts, quoted)
    if operator.endswith("?"):
        raise shell.state.error(
            line_of(node), f"{name}: {''.join(piece.text for piece in given) or 'not set'}; {words.unset_hint(shell, [name])}"
        )
    if operator.endswith("="):
        shell.state.set(name, "".join(piece.text for piece in given))
    return given


def _operand(shell: Evaluator, node: Node, parts: list[Node], quoted: bool) -> tuple[Piece, ...]:
    """What stands between the operator and the closing brace."""
    found = words.between(shell, node, parts[2:], parts[1].end_byte, node.end_byte - 1, quoted, False)
    return tuple(replace(piece, splits=not piece.quoted and not quoted) for piece in found)


def _prefixed(shell: Evaluator, node: Node, prefix: str, value: Value, is_array: bool, has_operator: bool) -> Value:
    if has_operator or (prefix == "!" and not is_array):
        raise _not_understood(shell, node)
    if prefix == "#":
        return str(len(value))
    return [str(number) for number in range(len(value))]


def _changed(shell: Evaluator, node: Node, value: Value, operator: str, operands: list[Node]) -> Value:
    if operator == ":":
        return _slice(shell, value, operands)
    if isinstance(value, list):
        return [_changed_text(shell, node, element, operator, operands) for element in value]
    return _changed_text(shell, node, value, operator, operands)


def _slice(shell: Evaluator, value: Value, operands: list[Node]) -> Value:
    numbers = [arithmetic.evaluate(shell.state, operand) for operand in operands if operand.is_named]
    start = numbers[0] if numbers else 0
    start = max(0, start + len(value)) if start < 0 else start
    if len(numbers) < 2:
        return value[start:]
    end = start + numbers[1] if numbers[1] >= 0 else len(value) + numbers[1]
    return value[start : max(start, end)]


def _changed_text(shell: Evaluator, node: Node, value: str, operator: str, operands: list[Node]) -> str:
    if operator in _CASES and not operands:
        return _CASES[operator](value)
    if operator not in _CUTS + _REPLACEMENTS:
        raise _not_understood(shell, node)
    given = [operand for operand in operands if operand.is_named]
    separator = next((index for index, operand in enumerate(operands) if not operand.is_named), len(operands))
    shell.state.budget.spend_on_pattern(len(value))
    try:
        pattern = glob_pattern(part for operand in operands[:separator] for part in words.pattern_parts(shell, operand))
    except PatternError as error:
        raise shell.state.error(line_of(node), str(error)) from None
    if operator in _CUTS:
        return _cut(value, operator, pattern)
    replacement = "".join(words.text(shell, operand) for operand in operands[separator + 1 :] if operand in given)
    return _replace(shell, value, operator, pattern, replacement)


def _cut(value: str, operator: str, pattern: Pattern) -> str:
    if operator.startswith("#"):
        found = ends(pattern, value)
        return value[found[-1] if operator == "##" else found[0] :] if found else value
    starts = [start for start in range(len(value) + 1) if (e := ends(pattern, value, start)) and e[-1] == len(value)]
    return value[: starts[0] if operator == "%%" else starts[-1]] if starts else value


def _replace(shell: Evaluator, value: str, operator: str, pattern: Pattern, replacement: str) -> str:
    found = list(search(pattern, value))
    if operator == "/#":
        found = [span for span in found if span[0] == 0]
    elif operator == "/%":
        found = [span for span in found if span[1] == len(value)]
    elif operator == "/":
        found = found[:1]
    shell.state.budget.spend(len(value) + len(found) * len(replacement))
    result, position = "", 0
    for start, end in found:
        result += value[position:start] + replacement
        position = end
    return result + value[position:]


def _not_understood(shell: Evaluator, node: Node) -> Exception:
    return shell.state.error(line_of(node), f"`{text_of(node)}` is not understood; write its value out, or set the variable before")
