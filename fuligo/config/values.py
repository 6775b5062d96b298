"""Conversion of pass-through values, patterns of layers among them, from text or YAML to the type of the schema."""

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fuligo.config.flag import Flag, Kind, did_you_mean, nearest
from fuligo.config.secret import Secret, protect

_MAX_LAYERS = 10_000
"""Upper bound that keeps a typo from exhausting memory."""
_MAX_TEXT = 100_000


def read_layers(text: str) -> list[int]:
    """Parse a pattern of lists of integers, `+`, `*` and parentheses: `[0]*3+[1]*2` -> `[0, 0, 0, 1, 1]`.

    Raises ValueError if the text is not such a pattern, or describes more than 10,000 layers.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError(f"the pattern has more than {_MAX_TEXT:,} characters")
    try:
        layers = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(layers, list):
        raise ValueError("the pattern is a number, not a list of integers")
    return layers


def layers_text(layers: list[int]) -> str:
    """Return a short pattern that `read_layers` parses to these layers: `[0]*3+[1]*2`."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    pattern = "+".join(f"[{layer}]*{count}" for layer, count in runs)
    return min(f"[{','.join(map(str, layers))}]", pattern or "[]", key=len)


def _value(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and number <= _MAX_LAYERS:
            return number
        case ast.List(elts=items):
            numbers = [_value(item) for item in items]
            if all(isinstance(number, int) for number in numbers):
                return numbers  # pyrefly: ignore[bad-return]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= _MAX_LAYERS:
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            items, times = _value(left), _value(right)
            if isinstance(items, int):
                items, times = times, items
            if isinstance(items, list) and isinstance(times, int) and len(items) * times <= _MAX_LAYERS:
                return items * times
    raise ValueError(f"{ast.unparse(node)!r} is not a list of at most {_MAX_LAYERS:,} integers")


_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class _InvalidItem(Exception):
    """Raised for a wrong item of a list; caught in this module."""

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.item = item


def checked_value(flag: Flag, given: Any) -> Any:
    """Convert `given` to the type of the flag. Raises ValueError with the rule: `'x' is not valid; it must be an integer >= 1`."""
    try:
        return _READERS[flag.kind](flag, given)
    except _InvalidItem as error:
        raise ValueError(invalid_reason(flag, error.item)) from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ValueError(invalid_reason(flag, given)) from None


def invalid_reason(flag: Flag, given: Any) -> str:
    """Return why a value is refused: the value, the rule, the default, and a suggestion."""
    choices = [choice for choice in nearest(given, flag.choices)[:1] if isinstance(choice, str)] if isinstance(given, str) else []
    quote = "; put it in quotes" if flag.kind is Kind.TEXT else ""
    default = "" if flag.default in (None, "", [], {}) else f" (default: {flag.default})"
    shown = "the value" if flag.is_secret else "null" if given is None else repr(given)
    return f"{shown} is not valid; it must be {flag.rule}{default}{did_you_mean(choices)}{quote}"


def _boolean(flag: Flag, given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if not isinstance(given, str) or given.lower() not in ("true", "false"):
        raise ValueError
    return given.lower() == "true"


def _integer(flag: Flag, given: Any) -> int:
    number = int(given, 10) if isinstance(given, str) else given
    if type(number) is not int:
        raise ValueError
    return _inside(flag, number)


def _size(flag: Flag, given: Any) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", given.strip()) if isinstance(given, str) else None
    if match is None:
        return _integer(flag, given)
    number, suffix = match.groups()
    size = float(number) * _SUFFIXES[suffix]
    if size != int(size) or ("." in number and suffix.endswith("i")):
        raise ValueError
    return _inside(flag, int(size))


def _number(flag: Flag, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError
    number = float(given)
    if not math.isfinite(number):
        raise ValueError
    return _inside(flag, number)


def _inside(flag: Flag, number: Any) -> Any:
    for bound in filter(None, flag.bounds.split(" and ")):
        sign, limit = bound.split()
        if not _COMPARE[sign](number, float(limit)):
            raise ValueError
    if flag.choices and str(number) not in flag.choices:
        raise ValueError
    return number


def _text(flag: Flag, given: Any) -> str | Secret:
    if isinstance(given, Secret):
        return given
    if not isinstance(given, str) or (flag.choices and given not in flag.choices):
        raise ValueError
    return given if flag.choices else protect(given, flag.flat_name.upper(), always=flag.is_secret)


def _list_of(item: Callable[[Flag, Any], Any]) -> Callable[[Flag, Any], list[Any]]:
    def read(flag: Flag, given: Any) -> list[Any]:
        if not isinstance(given, (list, tuple)):
            raise ValueError
        values = []
        for number, entry in enumerate(given, start=1):
            try:
                values.append(item(replace(flag, name=f"{flag.name}_{number}") if flag.is_secret else flag, entry))
            except (ValueError, TypeError, OverflowError):
                raise _InvalidItem(entry) from None
        return values

    return read


def _json_of(kind: type) -> Callable[[Flag, Any], Any]:
    def read(flag: Flag, given: Any) -> Any:
        value = json.loads(given) if isinstance(given, str) else given
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


def _layers(flag: Flag, given: Any) -> int | list[int]:
    if isinstance(given, str):
        return read_layers(given) if "[" in given else _integer(flag, given)
    if isinstance(given, list):
        return [_integer(flag, entry) for entry in given]
    return _integer(flag, given)


_READERS: dict[Kind, Callable[[Flag, Any], Any]] = {
    Kind.BOOL: _boolean,
    Kind.INT: _integer,
    Kind.SIZE: _size,
    Kind.FLOAT: _number,
    Kind.TEXT: _text,
    Kind.CHOICE: _text,
    Kind.TEXT_LIST: _list_of(_text),
    Kind.INT_LIST: _list_of(_integer),
    Kind.FLOAT_LIST: _list_of(_number),
    Kind.JSON: _json_of(dict),
    Kind.JSON_LIST: _json_of(list),
    Kind.LAYERS: _layers,
}
