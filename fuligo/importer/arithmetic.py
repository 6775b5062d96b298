"""`$((...))`, `((...))` and `for ((...))`: bash's integers of 64 bits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from tree_sitter import Node

from fuligo.importer.state import State
from fuligo.importer.syntax import line_of, text_of

_LIMIT = 2**63
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
_WRAPPERS = ("arithmetic_expansion", "parenthesized_expression", "compound_statement", "string")


def evaluate(state: State, node: Node) -> int:
    """The value of an expression; assignments in it happen.

    Raises:
        ConfigError: not an integer, division by zero, more than 64 bits, or an operator that is not understood.
    """
    value = _value(state, node)
    if not -_LIMIT <= value < _LIMIT:
        raise state.error(line_of(node), f"`{text_of(node)[:100]}` is larger than 64 bits")
    return value


def _value(state: State, node: Node) -> int:
    match node.type:
        case "number" | "word" | "variable_name" | "string_content":
            return _operand(state, node, text_of(node).strip())
        case "simple_expansion" | "expansion" if re.fullmatch(r"\$(\w+|#|\{\w+\}|\{#\w+\[@\]\})", text_of(node)):
            return _expanded(state, node)
        case kind if kind in _WRAPPERS:
            inner = node.named_children
            return 0 if not inner else evaluate(state, inner[-1])
        case "binary_expression":
            return _binary(state, node)
        case "unary_expression":
            return _unary(state, node)
        case "postfix_expression":
            name = text_of(node.named_children[0])
            before = _operand(state, node, name)
            state.set(name, str(before + (1 if text_of(node).endswith("++") else -1)))
            return before
        case "ternary_expression":
            condition, chosen, otherwise = node.named_children
            return evaluate(state, chosen if evaluate(state, condition) else otherwise)
        case "variable_assignment":
            name, value = node.named_children[0], evaluate(state, node.named_children[-1])
            state.set(text_of(name), str(value))
            return value
    raise _not_understood(state, node)


def _operand(state: State, node: Node, text: str) -> int:
    """A number, or a variable's number; as in bash, an unset one is an error here and 0 there."""
    if re.fullmatch(r"-?\d{1,19}", text):
        return int(text)
    value = state.get(text) if text.isidentifier() else None
    if text.isidentifier() and value is None:
        raise state.unset_error(line_of(node), text)
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,19}\s*", value):
        return int(value)
    raise state.error(line_of(node), f"`{text[:50]}` is no integer" + (f": its value is {value!r}" if value is not None else ""))


def _expanded(state: State, node: Node) -> int:
    text = text_of(node)
    if text == "$#":
        return len(state.positional)
    if text.startswith("${#"):
        value = state.get(text[3:-4])
        return len(value) if isinstance(value, list) else int(value is not None)
    name = text.strip("${}")
    if name.isdigit():
        if int(name) > len(state.positional):
            raise state.unset_error(line_of(node), name)
        return _operand(state, node, state.positional[int(name) - 1])
    return _operand(state, node, name)


def _binary(state: State, node: Node) -> int:
    left, right = node.named_children[0], node.named_children[-1]
    sign = text_of(node.children[1])
    if sign in ("&&", "||"):
        first = bool(evaluate(state, left))
        return int(first if first == (sign == "||") else bool(evaluate(state, right)))
    if sign == "=" or (sign.endswith("=") and sign[:-1] in (*_OPERATORS, "/", "%") and sign not in _OPERATORS):
        value = evaluate(state, right)
        value = value if sign == "=" else _combine(state, node, evaluate(state, left), sign[:-1], value)
        state.set(text_of(left), str(value))
        return value
    return _combine(state, node, evaluate(state, left), sign, evaluate(state, right))


def _combine(state: State, node: Node, left: int, sign: str, right: int) -> int:
    if sign in _OPERATORS:
        return int(_OPERATORS[sign](left, right))
    if sign in ("/", "%"):
        if right == 0:
            raise state.error(line_of(node), f"`{text_of(node)[:100]}` divides by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if sign == "/" else left - quotient * right
    if sign == "**" and 0 <= right < 64:
        return left**right
    if sign in ("<<", ">>") and 0 <= right < 64:
        return left << right if sign == "<<" else left >> right
    raise _not_understood(state, node)


def _unary(state: State, node: Node) -> int:
    sign, operand = text_of(node.children[0]), node.named_children[-1]
    if sign in ("++", "--"):
        value = _operand(state, node, text_of(operand)) + (1 if sign == "++" else -1)
        state.set(text_of(operand), str(value))
        return value
    value = evaluate(state, operand)
    match sign:
        case "-":
            return -value
        case "+":
            return value
        case "!":
            return int(not value)
    raise _not_understood(state, node)


def _not_understood(state: State, node: Node) -> Exception:
    return state.error(line_of(node), f"the expression `{text_of(node)[:100]}` is not understood; write its value out")
