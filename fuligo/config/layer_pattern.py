"""Per-layer patterns of Megatron, such as `[0]*3+[1]*89`, parsed with Python's grammar and never evaluated."""

import ast

_MAX_LAYERS = 10_000
"""Upper bound that keeps a typo from exhausting memory."""
_MAX_TEXT = 100_000


def read_layers(text: str) -> list[int]:
    """Parse a pattern: `[0]*3+[1]*2` -> `[0, 0, 0, 1, 1]`. It may hold lists of integers, `+`, `*` and parentheses.

    Raises ValueError if the text is not such a pattern, or describes more than 10,000 layers.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError("too long")
    try:
        layers = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(layers, list):
        raise ValueError("a number, not a list")
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
                return numbers  # pyright: ignore[reportReturnType]
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
    raise ValueError(f"{ast.unparse(node)!r} is not a list of integers")
