"""`[ ... ]`, `[[ ... ]]` and `test`. Files outside of the script's folder are not looked up: they are taken to exist, and it is noted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tree_sitter import Node

from fuligo.importer import words
from fuligo.importer.patterns import PatternError, glob_pattern, matches
from fuligo.importer.state import State
from fuligo.importer.syntax import line_of, text_of
from fuligo.importer.words import Evaluator

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_FILE_TESTS = ("-e", "-f", "-d", "-r", "-w", "-x", "-s", "-L", "-h")
_UNARY = ("-z", "-n", "-v", *_FILE_TESTS)
_BINARY = ("=", "==", "!=", "<", ">", "=~", *_COMPARISONS)
_NESTED = ("binary_expression", "unary_expression", "parenthesized_expression")


@dataclass(frozen=True, slots=True)
class _Token:
    """A word or an operator between the brackets."""

    text: str
    """As it is written."""
    node: Node | None
    """None for an argument of `test`: its text is its value."""
    is_literal: bool
    """Outside of quotes and without expansions: may be an operator."""


def evaluate(shell: Evaluator, node: Node) -> bool:
    """The truth of `[ ... ]` or `[[ ... ]]`."""
    return _Expression(shell, line_of(node), [*_tokens(node.children[1:-1])], text_of(node.children[0]) == "[[").value()


def test_arguments(shell: Evaluator, line: int, arguments: Sequence[str]) -> bool:
    """The truth of `test` with its arguments."""
    return _Expression(shell, line, [_Token(text, None, True) for text in arguments], is_double=False).value()


def _tokens(nodes: Sequence[Node]) -> Iterator[_Token]:
    """The leaves in order: the grammar's own precedence is not bash's."""
    for node in nodes:
        if node.type in _NESTED:
            yield from _tokens(node.children)
        elif text_of(node).strip():
            yield _Token(text_of(node), node, node.type in ("word", "test_operator", "number") or not node.is_named)


class _Expression:
    """Reads the tokens from left to right; what does not matter is not expanded."""

    def __init__(self, shell: Evaluator, line: int, tokens: list[_Token], is_double: bool) -> None:
        self.shell, self.state, self.line, self.tokens, self.is_double = shell, shell.state, line, tokens, is_double
        self.position = 0

    def value(self) -> bool:
        if not self.tokens:
            return False
        result = self._either(True)
        if self.position < len(self.tokens):
            raise self._not_understood()
        return result

    def _either(self, counts: bool) -> bool:
        result = self._both(counts)
        while self._take("||", "-o"):
            result = self._both(counts and not result) or result
        return result

    def _both(self, counts: bool) -> bool:
        result = self._single(counts)
        while self._take("&&", "-a"):
            result = self._single(counts and result) and result
        return result

    def _single(self, counts: bool) -> bool:
        if self._take("!"):
            return not self._single(counts)
        if self._take("("):
            result = self._either(counts)
            if not self._take(")"):
                raise self._not_understood()
            return result
        first = self._next()
        if first.is_literal and first.text in _UNARY and self.position < len(self.tokens) and not self._is_binary():
            operand = self._next()
            return counts and self._unary(first.text, operand)
        if not self._is_binary():
            return counts and self._text(first, unset_is_empty=True) != ""
        operator, right = self._next().text, self._next()
        return counts and self._binary(first, operator, right)

    def _is_binary(self) -> bool:
        """An operator with two sides comes next."""
        token = self.tokens[self.position] if self.position + 1 < len(self.tokens) else None
        return token is not None and token.is_literal and token.text in _BINARY

    def _take(self, *operators: str) -> bool:
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        found = token is not None and token.is_literal and token.text in operators
        self.position += found
        return found

    def _next(self) -> _Token:
        if self.position >= len(self.tokens):
            raise self._not_understood()
        self.position += 1
        return self.tokens[self.position - 1]

    def _text(self, token: _Token, unset_is_empty: bool = False) -> str:
        return token.text if token.node is None else words.text(self.shell, token.node, unset_is_empty)

    def _unary(self, operator: str, token: _Token) -> bool:
        if operator == "-v":
            return self.state.get(token.text) is not None
        text = self._text(token, unset_is_empty=operator in ("-z", "-n"))
        if operator in ("-z", "-n"):
            return (text == "") == (operator == "-z")
        return _file_test(self.state, self.line, operator, text)

    def _binary(self, left: _Token, operator: str, right: _Token) -> bool:
        text = self._text(left)
        if operator in ("=", "==", "!="):
            return self._equals(text, right) == (operator != "!=")
        if operator in ("<", ">"):
            return text < self._text(right) if operator == "<" else text > self._text(right)
        if operator in _COMPARISONS:
            return _COMPARISONS[operator](self._integer(text), self._integer(self._text(right)))
        raise self._not_understood()

    def _equals(self, text: str, right: _Token) -> bool:
        """Between double brackets the right side is a pattern."""
        if not self.is_double or right.node is None:
            return text == self._text(right)
        try:
            pattern = glob_pattern(words.pattern_parts(self.shell, right.node))
        except PatternError as error:
            raise self.state.error(self.line, str(error)) from None
        self.state.budget.spend(len(pattern) * (len(text) + 1))
        return matches(pattern, text)

    def _integer(self, text: str) -> int:
        if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text):
            raise self.state.error(self.line, f"{text!r} is no integer")
        return int(text)

    def _not_understood(self) -> Exception:
        return self.state.error(self.line, f"the test `{' '.join(token.text for token in self.tokens)[:100]}` is not understood")


def _file_test(state: State, line: int, operator: str, text: str) -> bool:
    path = state.path(text)
    if not state.files.is_known(path):
        state.note(line, f"{operator} {text} is taken to be true: nothing outside of {state.files.root} is looked at")
        return True
    if operator == "-d":
        return state.files.exists(path, directory=True)
    return state.files.exists(path, directory=False) or (operator != "-f" and state.files.exists(path, directory=True))
