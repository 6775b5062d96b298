"""Bars of characters: coloured blocks, or letters without colour."""

from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

_KNOWN = {
    "weights": ("w", "blue"),
    "draft_weights": ("W", "bright_blue"),
    "engine_weights": ("E", "blue"),
    "gradients": ("g", "cyan"),
    "optimizer": ("o", "yellow"),
    "activations": ("a", "red"),
    "backward": ("b", "bright_red"),
    "logits": ("l", "magenta"),
    "kv_cache": ("k", "green"),
    "graphs": ("h", "bright_green"),
    "samples": ("s", "bright_white"),
    "batches": ("B", "white"),
    "routing_record": ("R", "bright_white"),
    "communication": ("c", "bright_magenta"),
    "deepep": ("d", "bright_magenta"),
    "workspace": ("p", "bright_black"),
    "runtime": ("r", "bright_black"),
    "fragmentation": ("f", "white"),
    "engine": ("e", "bright_yellow"),
    "engines": ("e", "green"),
    "trainer": ("t", "bright_cyan"),
    "teacher": ("T", "bright_blue"),
}
"""Letter and colour of common memory parts and of the lanes of a step."""
_OTHER_COLOURS = ("bright_white", "bright_blue")
_BLOCK = "█"


class Palette:
    """Letter and colour of each name."""

    def __init__(self, names: Iterable[str], *, coloured: bool) -> None:
        """Assign letters and colours; without colour, bars consist of letters."""
        self._coloured = coloured
        self._letters: dict[str, str] = {}
        self._styles: dict[str, str] = {}
        names = dict.fromkeys(names)
        taken = {_KNOWN[name][0] for name in names if name in _KNOWN}
        others = iter(_OTHER_COLOURS * len(names))
        for name in names:
            if name in _KNOWN:
                self._letters[name], self._styles[name] = _KNOWN[name]
                continue
            self._letters[name] = next((letter for letter in name + name.upper() if letter.isalpha() and letter not in taken), "#")
            self._styles[name] = next(others)
            taken.add(self._letters[name])

    def run(self, name: str, length: int) -> Text:
        """Return `length` characters of one part."""
        return Text((_BLOCK if self._coloured else self._letters[name]) * length, self._styles[name])

    def legend(self, width: int) -> Iterator[Text]:
        """Yield the lines of the legend, such as `w weights  g gradients`, in the order of the names."""
        line = Text()
        for name in self._letters:
            entry = Text.assemble(self.run(name, 1), " ", name.replace("_", " "))
            if line and len(line) + 2 + len(entry) > width:
                yield line
                line = Text()
            line = Text("  ").join([line, entry]) if line else entry
        yield line


def stacked_bar(parts: Sequence[tuple[str, float]], capacity: float, scale: float, width: int, palette: Palette) -> Text:
    """Draw the parts side by side, dots up to the capacity, and `|` at it; the excess follows the `|`.

    `width` characters stand for `scale`, which is at least the capacity and the sum of the parts.
    """
    cells: list[str | None] = []
    total = 0.0
    for name, size in parts:
        total += size
        cells += [name] * (round(total / scale * width) - len(cells))
    end = round(capacity / scale * width)
    cells += [None] * (end - len(cells))
    bar = Text()
    for position, name in enumerate(cells):
        if position == end:
            bar.append("|", "bold red")
        bar.append("·", "bright_black") if name is None else bar.append_text(palette.run(name, 1))
    return bar.append("|", "bold") if len(cells) == end else bar


def span_bar(name: str, start: float, length: float, scale: float, width: int, palette: Palette) -> Text:
    """Draw a part that begins at `start`, at least one character wide."""
    first = min(round(start / scale * width), width - 1)
    last = max(round((start + length) / scale * width), first + 1)
    return Text.assemble(" " * first, palette.run(name, last - first), " " * (width - last))
