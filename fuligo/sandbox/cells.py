"""Loop of a sandboxed interpreter: programs come from a pipe and share their variables, like the cells of a notebook."""

import ast
import io
import linecache
import os
import random
import sys
import traceback
from types import CodeType, ModuleType, TracebackType
from typing import Any

_NAME = "<program>"
_RECURSION_LIMIT = 1000


def run_cells(requests: int, done: int) -> None:
    """Run programs from one pipe, and write a byte to another one after each, until the first pipe closes."""
    random.seed(0)  # the same program prints the same
    os.environ.clear()
    os.environ.update(HOME="/tmp", TMPDIR="/tmp", LANG="C.UTF-8", USER="nobody", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    sys.argv = [_NAME]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    with os.fdopen(requests, "rb") as programs:
        while size := programs.read(8):
            code = programs.read(int.from_bytes(size, "little")).decode("utf-8", "surrogatepass")
            _run(code, module.__dict__)
            os.write(done, b".")


def _run(code: str, scope: dict[str, Any]) -> None:
    """Run a program; print the value of an expression at its end, or the traceback of an exception."""
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    try:
        linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
        statements, expression = _compile(code)
        exec(statements, scope)
        if expression is not None and (value := eval(expression, scope)) is not None:
            print(repr(value))
    except SystemExit as end:
        if end.code not in {None, 0}:
            print(f"SystemExit: {end.code}")
    except BaseException as error:
        _print_exception(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the program may have put anything there
                continue


def _stream(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


def _compile(code: str) -> tuple[CodeType, CodeType | None]:
    """Compile all statements but a last expression, and that expression."""
    tree = ast.parse(code, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    expression = compile(ast.Expression(last.value), _NAME, "eval") if isinstance(last, ast.Expr) else None
    return compile(tree, _NAME, "exec"), expression


def _print_exception(error: BaseException) -> None:
    """Print a traceback that begins in the program."""
    start: TracebackType | None = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename != _NAME:
        start = start.tb_next
    try:
        traceback.print_exception(type(error), error, start)
    except BaseException as broken:  # an exception of the program's own that cannot be printed, or no memory
        os.write(2, f"{type(error).__name__} (and {type(broken).__name__} while it was printed)\n".encode())
