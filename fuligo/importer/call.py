"""A command with its arguments, and what it sees of the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tree_sitter import Node

from fuligo.importer.state import State, Streams
from fuligo.importer.words import Evaluator

_MAX_SHOWN = 100


class Shell(Evaluator, Protocol):
    """The interpreter, for commands."""

    state: State

    def run(self, node: Node, streams: Streams) -> int:
        """Evaluate one statement; its status."""
        ...

    def sequence(self, nodes: Iterable[Node], streams: Streams) -> int:
        """Evaluate statements; the status of the last."""
        ...

    def source(self, path: Path, text: bytes, streams: Streams) -> int:
        """Evaluate a file in this shell."""
        ...

    def in_subshell(self, work: Callable[[Shell], int]) -> int:
        """Do `work` in a shell whose changes are forgotten."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One command with its arguments."""

    name: str
    arguments: tuple[str, ...]
    line: int
    environment: dict[str, str]
    """Assignments in front of it: `NAME=value command`."""

    @property
    def words(self) -> list[str]:
        return [self.name, *self.arguments]

    def __str__(self) -> str:
        return shortened(" ".join(self.words))


def shortened(text: str) -> str:
    """On one line, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + " ..."


def print_text(shell: Evaluator, streams: Streams, text: str) -> None:
    """To standard output."""
    shell.state.budget.spend(len(text))
    streams.stdout.append(text)
