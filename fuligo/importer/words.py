"""Words of the script to texts: quotes, variables, arrays, substitutions, and bash's splitting into fields.

File names are never looked up: a pattern outside of quotes stays as it is written (as bash leaves one that matches nothing).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tree_sitter import Node

from fuligo.importer import arithmetic
from fuligo.importer.state import State, Value, how_to_set
from fuligo.importer.syntax import line_of, parse_script, text_of

_ESCAPES_IN_QUOTES = re.compile(r'\\([$`"\\])|\\\n')
_ESCAPES = re.compile(r"\\\n|\\(.)", re.DOTALL)
_ANSI_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_DEFAULT_SEPARATORS = " \t\n"
_MAX_RANGE = 10_000


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word after expansion."""

    text: str
    quoted: bool
    splits: bool = False
    """Comes from an expansion outside of quotes: spaces in it end a field."""
    ends_field: bool = False
    """No text: stands between the elements of an array."""


_NEXT_FIELD = Piece("", quoted=False, ends_field=True)


class Evaluator(Protocol):
    """What words need from the interpreter."""

    state: State

    def substitute(self, node: Node) -> str:
        """What the commands in `$(...)` print."""
        ...


def fields(shell: Evaluator, nodes: Iterable[Node]) -> list[str]:
    """Words to arguments: one word may give none, one or many."""
    parts: list[Piece] = []
    found: list[str] = []
    end = -1
    for node in nodes:
        if node.start_byte != end:  # the grammar sometimes takes one word for two that touch
            found += _split(shell, parts)
            parts = []
        elif node.type == "brace_expression":
            raise shell.state.error(line_of(node), f"`{text_of(node)}` is understood as a word of its own alone; write the words out")
        parts += pieces(shell, node, quoted=False)
        end = node.end_byte
    return found + _split(shell, parts)


def text(shell: Evaluator, node: Node, unset_is_empty: bool = False) -> str:
    """A word where nothing is split: the value of an assignment, an operand of a test."""
    return "".join(" " if piece.ends_field else piece.text for piece in pieces(shell, node, True, unset_is_empty))


def pattern_parts(shell: Evaluator, node: Node) -> list[tuple[str, bool]]:
    """A word as a pattern: (text, whether it is quoted and so taken literally)."""
    if node.type in ("regex", "extglob_pattern"):
        raw = text_of(node)
        if re.search(r"[$`()|]", raw):
            raise shell.state.error(line_of(node), f"the pattern {raw} is not understood; only *, ? and [...] are")
        return [(part[1:-1], True) if part[0] in "\"'" else (part, False) for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^"\']+', raw)]
    return [(piece.text, piece.quoted) for piece in pieces(shell, node, quoted=False)]


def pieces(shell: Evaluator, node: Node, quoted: bool, unset_is_empty: bool = False) -> list[Piece]:
    """The parts of one word.

    Args:
        quoted: it stands in double quotes, or where nothing is split.
        unset_is_empty: a variable that is not set is the empty text instead of an error.
    """
    raw = text_of(node)
    match node.type:
        case "word" | "test_operator" | "variable_name" | "regex" | "extglob_pattern" | "string_content" | "heredoc_content":
            return [_literal(shell, node, raw)]
        case "number" if not node.children:
            return [Piece(raw, quoted=False)]
        case "raw_string":
            return [Piece(raw[1:-1], quoted=True)]
        case "ansi_c_string":
            return [Piece(re.sub(r"\\(.)", lambda m: _ANSI_ESCAPES.get(m[1], m[0]), raw[2:-1]), quoted=True)]
        case "string":
            return _string(shell, node, unset_is_empty)
        case "concatenation":
            _refuse_words_in_braces(shell, node)
            return between(shell, node, node.children, node.start_byte, node.end_byte, quoted, unset_is_empty)
        case "simple_expansion":
            return _simple_expansion(shell, node, quoted, unset_is_empty)
        case "expansion":
            return _expansion(shell, node, quoted, unset_is_empty)
        case "command_substitution" if raw.startswith("$((") and raw.endswith("))"):
            return [_substituted(str(arithmetic.evaluate(shell.state, _as_arithmetic(shell, node))), quoted)]
        case "command_substitution":
            return [_substituted(shell.substitute(node), quoted)]
        case "arithmetic_expansion":
            return [_substituted(str(arithmetic.evaluate(shell.state, node)), quoted)]
        case "brace_expression":
            return _range(shell, node)
    raise shell.state.error(line_of(node), f"`{raw[:100]}` is not understood ({node.type.replace('_', ' ')})")


def _refuse_words_in_braces(shell: Evaluator, node: Node) -> None:
    """`mlx5_{0..7}`, `{a,b}.jsonl`: bash makes several words of them."""
    unquoted = "".join(text_of(child) if child.type in ("word", "brace_expression", "number") else "x" for child in node.children)
    if re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", unquoted.replace("\\{", "")):
        raise shell.state.error(line_of(node), f"`{text_of(node)[:100]}`: of braces, {{1..8}} alone is understood; write the words out")


def heredoc_text(shell: Evaluator, body: Node, expands: bool) -> str:
    """The text of a here-document."""
    if not expands:
        return text_of(body)
    return "".join(piece.text for piece in between(shell, body, body.children, body.start_byte, body.end_byte, True, False))


def _literal(shell: Evaluator, node: Node, raw: str) -> Piece:
    if raw.startswith("~") and (len(raw) == 1 or raw[1] == "/"):
        raise shell.state.error(line_of(node), f"{raw}: the home directory of the machine that runs the job is not known; write it out")
    if any("," in part.partition("}")[0] for part in raw.replace("\\{", "").split("{")[1:]):
        raise shell.state.error(line_of(node), f"`{raw}`: of braces, {{1..8}} alone is understood; write the words out")
    return Piece(_ESCAPES.sub(lambda match: match[1] or "", raw), quoted="\\" in raw)


def _as_arithmetic(shell: Evaluator, node: Node) -> Node:
    """In here-documents the grammar takes `$((...))` for commands; read alone, on its own line, it does not."""
    root = parse_script(b"\n" * node.start_point[0] + b"x=" + (node.text or b""), shell.state.sources[-1].name)
    value = root.children[0].child_by_field_name("value")
    if value is None or value.type != "arithmetic_expansion":
        raise shell.state.error(line_of(node), f"`{text_of(node)[:100]}` is not understood; write its value out")
    return value


def _unquote(raw: str) -> str:
    return _ESCAPES_IN_QUOTES.sub(lambda match: match[1] or "", raw)


def _substituted(value: str, quoted: bool) -> Piece:
    return Piece(value, quoted=quoted, splits=not quoted)


def _string(shell: Evaluator, node: Node, unset_is_empty: bool) -> list[Piece]:
    """`"..."`: one field, also an empty one, unless it is nothing but `"$@"` or `"${array[@]}"` without elements."""
    inner = between(shell, node, node.children[1:-1], node.start_byte + 1, node.end_byte - 1, True, unset_is_empty)
    only_elements = len(node.named_children) == 1 and re.fullmatch(r'"\$(@|\{(\w+\[)?@\]?\})"', text_of(node)) is not None
    return inner if only_elements else [Piece("", quoted=True), *inner]


def between(
    shell: Evaluator, parent: Node, children: Sequence[Node], start: int, end: int, quoted: bool, unset_is_empty: bool
) -> list[Piece]:
    """Children and the text between them: the grammar leaves out blanks and line ends in strings and here-documents."""
    source = parent.text or b""
    in_quotes = parent.type in ("string", "heredoc_body")
    found: list[Piece] = []

    def add_text(first: int, last: int) -> None:
        raw = source[first - parent.start_byte : last - parent.start_byte].decode()
        if raw:
            found.append(Piece(_unquote(raw) if in_quotes else raw, quoted))

    position = start
    for child in children:
        add_text(position, child.start_byte)
        if child.type in ("string_content", "heredoc_content") or not child.is_named:
            add_text(child.start_byte, child.end_byte)
        else:
            blank = len(text_of(child)) - len(text_of(child).lstrip()) if child.type == "simple_expansion" else 0
            add_text(child.start_byte, child.start_byte + blank)
            found += pieces(shell, child, quoted, unset_is_empty)
        position = child.end_byte
    add_text(position, end)
    return found


def _simple_expansion(shell: Evaluator, node: Node, quoted: bool, unset_is_empty: bool) -> list[Piece]:
    name = text_of(node).lstrip()[1:]
    return _values(shell, node, parameter(shell, name), name, quoted, unset_is_empty)


def parameter(shell: Evaluator, name: str) -> Value | None:
    """A variable or a special parameter; None where it is not set."""
    state = shell.state
    if name in ("@", "*"):
        return list(state.positional)
    if name == "#":
        return str(len(state.positional))
    if name == "?":
        return str(state.status)
    if name == "0":
        return str(state.sources[0])
    if name.isdigit():
        return state.positional[int(name) - 1] if int(name) <= len(state.positional) else None
    return state.get(name)


def _values(shell: Evaluator, node: Node, value: Value | None, name: str, quoted: bool, unset_is_empty: bool) -> list[Piece]:
    """A parameter's value: an array without a subscript gives its first element, `$@` all of them."""
    if value is None and unset_is_empty:
        shell.state.findings.tested_unset[name] = None
        value = ""
    if value is None:
        raise shell.state.unset_error(line_of(node), name)
    if isinstance(value, list) and name not in ("@", "*"):
        value = value[0] if value else ""
    if name == "*" and quoted:
        value = joined(shell, value)
    return _elements(shell, value, quoted)


def _elements(shell: Evaluator, value: Value, quoted: bool) -> list[Piece]:
    texts = value if isinstance(value, list) else [value]
    shell.state.budget.spend(sum(map(len, texts)) + len(texts))
    found: list[Piece] = []
    for number, element in enumerate(texts):
        found += [_NEXT_FIELD] * (number > 0) + [_substituted(element, quoted)]
    return found


def joined(shell: Evaluator, value: Value) -> str:
    return _separators(shell)[:1].join(value) if isinstance(value, list) else value


def _expansion(shell: Evaluator, node: Node, quoted: bool, unset_is_empty: bool) -> list[Piece]:
    """`${...}` in all forms that launch scripts use."""
    from fuligo.importer.expansions import expand

    value = expand(shell, node, quoted, unset_is_empty)
    if isinstance(value, tuple):
        return list(value)
    return _elements(shell, value, quoted)


def _range(shell: Evaluator, node: Node) -> list[Piece]:
    match = re.fullmatch(r"\{(-?\d+)\.\.(-?\d+)\}", text_of(node))
    if match is None or abs(int(match[2]) - int(match[1])) > _MAX_RANGE:
        raise shell.state.error(line_of(node), f"`{text_of(node)}` is not understood; {{1..8}} would be, up to {_MAX_RANGE:,} numbers")
    first, last = int(match[1]), int(match[2])
    step = 1 if last >= first else -1
    return _elements(shell, [str(number) for number in range(first, last + step, step)], quoted=True)


def _separators(shell: Evaluator) -> str:
    value = shell.state.get("IFS")
    return value if isinstance(value, str) else _DEFAULT_SEPARATORS


def _split(shell: Evaluator, parts: list[Piece]) -> list[str]:
    """Bash's word splitting at the characters of IFS."""
    separators = _separators(shell)
    found: list[str] = []
    current: str | None = None
    for piece in parts:
        if piece.ends_field:
            found += [] if current is None else [current]
            current = None
        elif not piece.splits:
            current = (current or "") + piece.text if piece.text or piece.quoted else current
        else:
            for character in piece.text:
                if character not in separators:
                    current = (current or "") + character
                elif character not in _DEFAULT_SEPARATORS or current is not None:
                    found.append(current or "")
                    current = None
    return found if current is None else [*found, current]


def unset_hint(shell: Evaluator, names: Iterable[str]) -> str:
    """How to set several variables, for the end of a message."""
    return "; ".join(how_to_set(name, shell.state.sources[0]) for name in names)
