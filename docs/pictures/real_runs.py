"""Draw real-runs.svg from the table of docs/real-runs.md: `python docs/pictures/real_runs.py docs/pictures/real-runs.svg`."""

import json
import sys
from pathlib import Path

ROLLOUTS = (0, 10, 20, 26)
PANELS = {
    "trained on short questions": {"short": (0.311, 0.654, 0.926, 0.984), "long": (0.162, 0.258, 0.051, 0.021)},
    "trained on long questions": {"long": (0.139, 0.330, 0.385, 0.410), "short": (0.297, None, None, 0.551)},
    "trained on long questions, LoRA": {"short": (0.297, 0.398, 0.568, None), "long": (0.160, 0.361, 0.594, None)},
}
COLORS = {
    "short": "#2a78d6",
    "long": "#c2571a",
    "tool called": "#2a78d6",
    "right answers": "#c2571a",
    "usual": "#2a78d6",
    "exact": "#c2571a",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 250, 190, 34, 40, 30, 34


def panel(
    title: str, curves: dict[str, tuple[float | None, ...]], x0: float, rollouts: tuple[int, ...] = ROLLOUTS, ticks: tuple[int, ...] = ()
) -> list[str]:
    """Return the elements of one diagram: shares by name, after the numbers of rollouts. `ticks`: the numbers to print (default: all)."""

    def place(rollout: float, value: float) -> tuple[float, float]:
        return x0 + WIDTH * rollout / rollouts[-1], TOP + HEIGHT * (1 - value)

    lines = [f'<text x="{x0}" y="18" class="title">{title}</text>']
    for value in (0, 0.25, 0.5, 0.75, 1):
        _, y = place(0, value)
        lines.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for rollout in ticks or rollouts:
        x, y = place(rollout, 0)
        lines.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{rollout}</text>')
    for name, values in curves.items():
        points = [place(rollout, value) for rollout, value in zip(rollouts, values, strict=True) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS[name]}"/>' for x, y in points]
        (x, y), last = points[-1], [value for value in values if value is not None][-1]
        is_upper = last == max(value for each in curves.values() for value in each[-2:] if value is not None) or last < 0.1
        place_of_name = f'x="{x:.1f}" y="{y - 8 if is_upper else y + 22:.1f}" text-anchor="end"'
        lines.append(f'<text {place_of_name} style="fill:{COLORS[name]}">{name} {last:.2f}</text>')
    return lines


def picture(panels: list[list[str]]) -> str:
    """Return the SVG of diagrams side by side."""
    body = [line for lines in panels for line in lines]
    width, height = LEFT + len(panels) * (WIDTH + GAP + LEFT) - GAP, TOP + HEIGHT + BOTTOM
    style = "text{font:12px sans-serif;fill:#57606a}.title{font-weight:bold}.grid{stroke:#8c959f;stroke-opacity:.3}"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>', *body, "</svg>\n"])


def draw(source: Path, output: Path, title: str, ticks: tuple[int, ...] = ()) -> None:
    """Draw one diagram from JSON: `rollouts`, and a list of shares for each curve."""
    curves = json.loads(source.read_text())
    rollouts = tuple(curves.pop("rollouts"))
    output.write_text(picture([panel(title, {name: tuple(values) for name, values in curves.items()}, LEFT, rollouts, ticks)]))


def main() -> None:
    step = WIDTH + GAP + LEFT
    Path(sys.argv[1]).write_text(picture([panel(title, curves, LEFT + i * step) for i, (title, curves) in enumerate(PANELS.items())]))


if __name__ == "__main__":
    main()
