"""Bars made of characters: coloured blocks where there is colour, letters where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

_COLOURS = {
    "weights": "blue",
    "draft_weights": "bright_blue",
    "gradients": "cyan",
    "optimizer": "yellow",
    "activations": "red",
    "backward": "bright_red",
    "logits": "magenta",
    "kv_cache": "green",
    "graphs": "bright_green",
    "communication": "bright_magenta",
    "runtime": "bright_black",
    "fragmentation": "white",
}
_OTHER_COLOURS = ("bright_yellow", "bright_cyan", "bright_white")
_BLOCK = "█"


class Palette:
    """A letter and a colour for each name, the same wherever it appears."""

    def __init__(self, names: Iterable[str], *, coloured: bool) -> None:
        """
        Args:
            coloured: the output shows colour; if not, bars consist of letters.
        """
        self._coloured = coloured
        self._letters: dict[str, str] = {}
        self._styles: dict[str, str] = {}
        for name in dict.fromkeys(names):
            taken = set(self._letters.values())
            self._letters[name] = next((letter for letter in name + name.upper() if letter.isalpha() and letter not in taken), "#")
            others = len([known for known in self._styles if known not in _COLOURS])
            self._styles[name] = _COLOURS.get(name, _OTHER_COLOURS[others % len(_OTHER_COLOURS)])

    def run(self, name: str, length: int) -> Text:
        """`length` characters of one part."""
        return Text((_BLOCK if self._coloured else self._letters[name]) * length, self._styles[name])

    def legend(self, width: int) -> Iterator[Text]:
        """`w weights  g gradients`, in the order of the names; as many lines as it takes, no entry broken."""
        line = Text()
        for name in self._letters:
            entry = Text.assemble(self.run(name, 1), " ", name.replace("_", " "))
            if line and len(line) + 2 + len(entry) > width:
                yield line
                line = Text()
            line = Text("  ").join([line, entry]) if line else entry
        yield line


def stacked_bar(parts: Sequence[tuple[str, float]], capacity: float, scale: float, width: int, palette: Palette) -> Text:
    """The parts side by side, dots up to the capacity, `|` at it; what is too much stands behind the `|`.

    Args:
        scale: what `width` characters stand for; at least the capacity and the sum of the parts.
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
    """A part that begins at `start`: at least one character wide, so that nothing vanishes."""
    first = min(round(start / scale * width), width - 1)
    last = max(round((start + length) / scale * width), first + 1)
    return Text.assemble(" " * first, palette.run(name, last - first), " " * (width - last))
