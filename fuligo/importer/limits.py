"""What a script may cost: endless loops, fork bombs and strings that double end with a clear error."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEPS = 20_000
"""Statements; the scripts of large models take some hundreds (a loop over 92 layers)."""
MAX_CHARACTERS = 2_000_000
"""Of all texts that expansions and commands make together."""
MAX_DEPTH = 40
"""Functions, substitutions and sourced files inside each other. Python's own stack ends at about 80."""
MAX_FILE_BYTES = 200_000
"""Of a script, and of a file that it reads."""
MAX_HEREDOCS = 100
"""In one file: the parser's time grows with their square."""


class LimitError(Exception):
    """A limit is reached; the interpreter adds the place. Its text says which."""


@dataclass(slots=True)
class Budget:
    """What is left; shared by everything that one script runs."""

    steps: int = MAX_STEPS
    characters: int = MAX_CHARACTERS
    depth: int = 0

    def step(self) -> None:
        """Count one statement."""
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"the script does not end: {MAX_STEPS:,} statements were evaluated")

    def spend_on_pattern(self, num_characters: int) -> None:
        """Count a search for a pattern in a text: from each of its characters to its end, in the worst case."""
        self.spend(num_characters**2 // 10)

    def spend(self, num_characters: int) -> None:
        """Count text before it is made or read."""
        self.characters -= num_characters
        if self.characters < 0:
            raise LimitError(f"the script makes more than {MAX_CHARACTERS:,} characters of text")

    def enter(self) -> None:
        """Count one level of nesting; `leave` takes it back."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise LimitError(
                f"functions, substitutions or sourced files are nested more than {MAX_DEPTH} deep (a function that calls itself?)"
            )

    def leave(self) -> None:
        self.depth -= 1
