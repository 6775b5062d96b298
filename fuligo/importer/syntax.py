"""Bash text to a syntax tree (tree-sitter's bash grammar); slips are named with their fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from fuligo.errors import ConfigError
from fuligo.importer.limits import MAX_FILE_BYTES, MAX_HEREDOCS

_SPACED_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?(\w+)(\s*)(\+?=)(\s*)(.*)$")

_LAST_CONTINUATION = re.compile(rb"(?<!\\)\\\n?\s*\Z")


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse_script(source: bytes, name: str) -> Node:
    """The tree of a whole script.

    Args:
        name: of the file, for messages.

    Raises:
        ConfigError: too large, not text, or not valid bash; names the line.
    """
    if len(source) > MAX_FILE_BYTES:
        raise ConfigError(f"{name}: more than {MAX_FILE_BYTES:,} bytes, which is no launch script")
    try:
        lines = source.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if source.count(b"<<") > MAX_HEREDOCS:
        raise ConfigError(f"{name}: more than {MAX_HEREDOCS} here-documents, which is no launch script")
    # A line that goes on at the end of the file is fine for bash, and not for the grammar.
    root = _parser().parse(_LAST_CONTINUATION.sub(b"\n", source)).root_node
    if root.has_error:
        line = min((node.start_point[0] for node in _broken(root)), default=0)
        text = lines[line].strip() if line < len(lines) else ""
        raise ConfigError(
            f"{name} line {line + 1}: not valid bash, or a form that is not understood: `{text[:200]}`{spaced_assignment(text)}"
        )
    return root


def spaced_assignment(line: str) -> str:
    """`; write ...` where the line is an assignment with spaces around its sign, else empty."""
    match = _SPACED_ASSIGNMENT.match(line)
    if match is None or not (match[2] or match[4]):
        return ""
    return f"; bash takes no space around {match[3]}: write `{match[1]}{match[3]}{match[5]}`"


def line_of(node: Node) -> int:
    """Counted from 1."""
    return node.start_point[0] + 1


def text_of(node: Node) -> str:
    """As it stands in the script."""
    return (node.text or b"").decode()


def first_line(node: Node) -> str:
    """The node's text for a message, shortened."""
    head, *rest = text_of(node).strip().split("\n", 1)
    return head[:100] + (" ..." if rest or len(head) > 100 else "")


def _broken(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        current = pending.pop()
        if current.is_error or current.is_missing:
            yield current
        pending.extend(current.children)
