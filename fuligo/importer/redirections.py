"""`<`, `<<`, `<<<`, `>`, `>>`, `2>`, `2>&1`, `&>`: what a command reads, and which files in memory take what it prints."""

from __future__ import annotations

from tree_sitter import Node

from fuligo.importer import words
from fuligo.importer.files import FileRefusedError
from fuligo.importer.state import Input, Streams
from fuligo.importer.syntax import first_line, line_of, text_of
from fuligo.importer.words import Evaluator

Writes = list[tuple[str, bool]]
"""(absolute path, whether it is appended to) of files that take what is printed."""


def applied(shell: Evaluator, statement: Node, streams: Streams) -> tuple[Streams, Writes]:
    """The streams of a statement with its redirections.

    Raises:
        ConfigError: a file that must not be read, a connection, or a form that is not understood.
    """
    writes: Writes = []
    for redirect in _redirects(statement):
        streams = _redirected(shell, redirect, streams, writes)
    return streams, writes


def with_herestring(shell: Evaluator, command: Node, streams: Streams) -> Streams:
    """`<<<`, which the grammar puts inside of a command; nothing else may stand there."""
    for child in command.children:
        if child.type == "herestring_redirect":
            streams = _herestring(shell, child, streams)
        elif child.type == "file_redirect":
            raise shell.state.error(line_of(command), f"`{first_line(command)}`: a redirection in front of a command is not understood")
    return streams


def _redirects(statement: Node) -> list[Node]:
    """In order; the grammar puts those behind a here-document's mark inside of it."""
    found = []
    for child in statement.children:
        if child.type.endswith("_redirect"):
            found.append(child)
            found += [inner for inner in child.children if inner.type == "file_redirect"] if child.type == "heredoc_redirect" else []
    return found


def _redirected(shell: Evaluator, node: Node, streams: Streams, writes: Writes) -> Streams:
    if node.type == "heredoc_redirect":
        return Streams(Input(_heredoc(shell, node)), streams.stdout)
    if node.type == "herestring_redirect":
        return _herestring(shell, node, streams)
    line = line_of(node)
    descriptor = next((text_of(child) for child in node.named_children if child.type == "file_descriptor"), "")
    sign = next(text_of(child) for child in node.children if not child.is_named)
    destination = node.child_by_field_name("destination")
    target = "" if destination is None else words.text(shell, destination)
    if sign == ">&" and target in ("1", "2"):
        return Streams(streams.stdin, shell.state.findings.printed) if target == "2" and descriptor in ("", "1") else streams
    if sign == "<" and descriptor in ("", "0"):
        return Streams(Input(_read(shell, line, target)), streams.stdout)
    if sign not in (">", ">>", "&>", "&>>", ">|") or descriptor not in ("", "1", "2") or not target:
        raise shell.state.error(line, f"the redirection `{first_line(node)}` is not understood")
    if shell.state.path(target).startswith(("/dev/tcp/", "/dev/udp/")):
        raise shell.state.error(line, f"{target} would open a connection; nothing is contacted")
    if descriptor == "2":
        return streams
    writes.append((shell.state.path(target), sign in (">>", "&>>")))
    return Streams(streams.stdin, [])


def _herestring(shell: Evaluator, node: Node, streams: Streams) -> Streams:
    return Streams(Input(words.text(shell, node.named_children[-1]) + "\n"), streams.stdout)


def _read(shell: Evaluator, line: int, target: str) -> str:
    try:
        return shell.state.files.read(shell.state.path(target))
    except FileRefusedError as error:
        raise shell.state.error(line, str(error)) from None


def _heredoc(shell: Evaluator, node: Node) -> str:
    start = next(text_of(child) for child in node.named_children if child.type == "heredoc_start")
    body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
    if body is None:
        return ""
    text = words.heredoc_text(shell, body, expands=not set(start) & set("'\"\\"))
    strips_tabs = any(not child.is_named and text_of(child) == "<<-" for child in node.children)
    return "".join(line.lstrip("\t") for line in text.splitlines(keepends=True)) if strips_tabs else text
