"""Check that no docstring opens with Of, What, Who, Where, Whether, How, Which.

    python scripts/check_docstrings.py

The docstring of a function says what it does ("Return the rank of a process"); that of a class, module or field says what it is ("Rank of a
process").
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("fuligo", "tests", "benchmarks", "tools", "examples", "scripts", "docs")
OPENINGS = re.compile(r"\s*(Of|What|Who|Whose|Where|Whether|How|Which)\b")


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a module, a statement or a clause, at any depth; expressions, which have none, are not walked."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, [])
        if inner and isinstance(inner[0], ast.stmt):
            yield inner
        for child in inner:
            yield from blocks(child)


def docstrings(module: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, its classes and functions, and the strings below their assignments."""
    for block in blocks(module):
        for position, statement in enumerate(block):
            documents = position == 0 or isinstance(block[position - 1], ast.Assign | ast.AnnAssign)
            if documents and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value


def violations(file: Path) -> Iterator[str]:
    """Yield `file:line: text` for every docstring that opens with one of these words; `text` is its first line."""
    for docstring in docstrings(ast.parse(file.read_bytes())):
        if isinstance(docstring.value, str) and OPENINGS.match(docstring.value):
            yield f"{file}:{docstring.lineno}: {docstring.value.strip().splitlines()[0]}"


def main() -> int:
    files = [file for folder in FOLDERS for file in sorted(Path(folder).rglob("*.py"))]
    found = [violation for file in files for violation in violations(file)]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        print(f"{len(found)} docstrings open with Of, What, Who, Where, Whether, How or Which; say what the function does, or what it is")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
