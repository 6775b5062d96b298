"""Progress on the console during a run: a live panel on a terminal, otherwise one line per step, or nothing."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fuligo.observability.jsonl import Record
from fuligo.observability.trace import DOING
from fuligo.quantities import count

REFRESH_PER_S = 4
MAX_ALIKE = 3
"""Maximum number of warnings shown per call site; further ones are in log.txt only."""
_BARS = "▁▂▃▄▅▆▇█"
_OF_A_STEP = ("rollout", "score", "train")


@contextmanager
def warnings_shown_on(console: Console) -> Iterator[None]:
    """Show warnings and errors that fuligo logs, without tracebacks."""
    handler = _ConsoleHandler(console)
    logger = logging.getLogger("fuligo")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def warnings_before_progress(mode: str) -> AbstractContextManager[None]:
    """Show warnings while a run is set up, before its progress display of this mode shows them."""
    return nullcontext() if mode == "none" else warnings_shown_on(Console(highlight=False))


def show_origin(mode: str, checkpoint: Path, step: int, num_rollout: int, console: Console | None = None) -> None:
    """Show from which checkpoint, and after how many rollouts, a run resumes, before the progress display of this mode starts."""
    if mode != "none":
        console = console or Console(highlight=False)
        console.print(f"resuming from {checkpoint}, after {step} of {count(num_rollout, 'rollout')}", markup=False, soft_wrap=True)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._num_alike: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        place = f"{record.name}:{record.lineno}"
        self._num_alike[place] += 1
        if self._num_alike[place] > MAX_ALIKE:
            return
        last = " (further warnings of this kind are in log.txt only)" if self._num_alike[place] == MAX_ALIKE else ""
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        self._console.print(Text.assemble((record.levelname.lower(), style), f": {record.getMessage()}{last}"), soft_wrap=True)


class Progress:
    """Display of a run's phases and steps, as a context manager, so that it can restore the terminal. This base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def phase(self, name: str, step: int) -> None:
        """Show that a phase begins (called by `Trace`)."""

    def record(self, record: Record) -> None:
        """Show that a step is complete."""

    def evaluation(self, num_rollouts: int, metrics: Record, first: Record | None) -> None:
        """Show the metrics `eval/*` after `num_rollouts` rollouts next to those of the run's first evaluation."""


def open_progress(
    mode: Literal["auto", "rich", "plain", "none"], title: str, num_rollouts: int, *, start: int = 0, console: Console | None = None
) -> Progress:
    """Return the progress display of a mode.

    Args:
        mode: auto is rich on a terminal and plain elsewhere.
        title: name or directory of the run.
        num_rollouts: number of rollouts of the whole run.
        start: step at which the run starts or resumes.
        console: console to write to (default: standard output).
    """
    if mode == "none":
        return Progress()
    console = console or Console(highlight=False)
    if mode == "rich" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console, Curves(title, num_rollouts, start))
    return PlainProgress(console, num_rollouts)


class PlainProgress(Progress):
    """Progress as one line per step, for logs and pipes."""

    def __init__(self, console: Console, num_rollouts: int) -> None:
        self._console = console
        self._num_rollouts = num_rollouts
        self._warnings = warnings_shown_on(console)

    def __enter__(self) -> Self:
        self._warnings.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._warnings.__exit__(None, None, None)

    def record(self, record: Record) -> None:
        fields = [
            f"step {record['step'] + 1}/{self._num_rollouts}",
            _field(record, "reward", "rollout/reward_mean", ".3f"),
            _field(record, "length", "rollout/response_len_mean", ".1f"),
            # The policy-gradient loss of an on-policy step is always 0, although its gradient is not.
            _field(record, "loss", "train/loss", "z.4f") if "train/pg_loss" not in record else "",
            _field(record, "kl", "train/kl", "z.4f"),
            _field(record, "entropy", "train/entropy", ".3f"),
            _field(record, "reverse_kl", "train/opd_reverse_kl", "z.4f"),
            _field(record, "grad_norm", "train/grad_norm", ".3g"),
            _field(record, "tokens/s", "rollout/tokens_per_s", ",.0f"),
            _field(record, "s", "perf/step_s", ".2f"),
        ]
        self._print("  ".join(field for field in fields if field))

    def evaluation(self, num_rollouts: int, metrics: Record, first: Record | None) -> None:
        for name, text in _evaluated(metrics, first).items():
            self._print(f"eval {num_rollouts}/{self._num_rollouts}  {name}  {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class Curves:
    """State of a run that the panel shows."""

    title: str
    num_rollouts: int
    start: int = 0
    clock: Callable[[], float] = time.monotonic
    reward: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    latest: Record = field(default_factory=dict)
    evaluated: dict[str, str] = field(default_factory=dict)
    """Latest evaluation as text, by name of the dataset."""
    doing: tuple[str, int] | None = None
    """Current phase and its step; None between phases."""
    doing_since_s: float = 0.0
    """Time of `clock` at which the current phase began."""
    begun_s: float = 0.0
    """Time of `clock` at which the run started or resumed."""

    def __post_init__(self) -> None:
        self.begun_s = self.doing_since_s = self.clock()

    def phase(self, name: str, step: int) -> None:
        self.doing, self.doing_since_s = (name, step), self.clock()

    def record(self, record: Record) -> None:
        self.latest = record
        for values, key in ((self.reward, "rollout/reward_mean"), (self.length, "rollout/response_len_mean")):
            if math.isfinite(record.get(key, math.nan)):
                values.append(record[key])

    @property
    def num_done(self) -> int:
        """Number of complete rollouts."""
        return self.latest["step"] + 1 if self.latest else self.start

    def eta_s(self) -> float | None:
        """Return the seconds until the end of the run at the pace so far; None before the first step."""
        here = self.num_done - self.start
        return (self.clock() - self.begun_s) / here * (self.num_rollouts - self.num_done) if here else None


class LiveProgress(Progress):
    """Progress as a panel of a few lines, redrawn in place. The last state stays on the terminal when the run ends."""

    def __init__(self, console: Console, curves: Curves) -> None:
        self._curves = curves
        self._warnings = warnings_shown_on(console)
        self._live = Live(Panel(curves), console=console, refresh_per_second=REFRESH_PER_S, redirect_stdout=True, redirect_stderr=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._warnings.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._curves.doing = None
        self._warnings.__exit__(None, None, None)
        self._live.__exit__(None, None, None)

    def phase(self, name: str, step: int) -> None:
        self._curves.phase(name, step)

    def record(self, record: Record) -> None:
        self._curves.record(record)

    def evaluation(self, num_rollouts: int, metrics: Record, first: Record | None) -> None:
        self._curves.evaluated = _evaluated(metrics, first)


@dataclass(slots=True)
class Panel:
    """Panel, which Rich renders at the available width, at most 100 columns."""

    curves: Curves

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        curves, width = self.curves, min(options.max_width, 100)
        yield self._header(width)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=6)
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=width - 10)
        curve_width = max(8, width - 34)
        grid.add_row(
            "reward", _curve(curves.reward, ".3f", curve_width, "green", low=min([0.0, *curves.reward]), high=max([1.0, *curves.reward]))
        )
        grid.add_row("length", _curve(curves.length, ".1f", curve_width, "cyan", low=0.0))
        for name, text in curves.evaluated.items():
            grid.add_row("eval", f"{name}  {text}")
        latest = self.curves.latest
        parts = [
            _field(latest, "", "rollout/tokens_per_s", ",.0f", " tokens/s sampled"),
            _field(latest, "", "train/tokens_per_s", ",.0f", " trained"),
            _field(latest, "", "perf/step_s", ".2f", " s per step"),
        ]
        grid.add_row("speed", Text(" · ".join(part.strip() for part in parts if part) or "-"))
        grid.add_row("now", self._now())
        yield grid

    def _header(self, width: int) -> Text:
        curves = self.curves
        eta = curves.eta_s()
        right = f"step {curves.num_done}/{curves.num_rollouts}"
        if eta is not None and curves.num_done < curves.num_rollouts:
            right += f"  {_duration(eta)} left"
        left = Text("fuligo  ", style="bold").append(curves.title, style="not bold")
        left.truncate(max(8, width - len(right) - 2), overflow="ellipsis")
        return left.append(" " * max(2, width - left.cell_len - len(right))).append(right, style="not bold")

    def _now(self) -> Text:
        curves = self.curves
        if curves.doing is None:
            return Text("done" if curves.num_done >= curves.num_rollouts else "stopped" if curves.latest else "starting")
        name, step = curves.doing
        elapsed = _duration(curves.clock() - curves.doing_since_s)
        of_step = f", step {step + 1}" if name in _OF_A_STEP else ""
        return Text(f"{DOING.get(name, name)}{of_step}").append(f"  {elapsed}", style="dim")


def _curve(values: list[float], spec: str, width: int, style: str, *, low: float, high: float | None = None) -> Text:
    if not values:
        return Text("-")
    now = format(values[-1], spec).rjust(7)
    text = Text(now, style="bold").append("  ").append(sparkline(values, width, low=low, high=high), style=style)
    return text.append(f"  from {format(values[0], spec)}", style="dim")


def _field(record: Record, name: str, key: str, spec: str, unit: str = "") -> str:
    value = record.get(key)
    return "" if value is None else f"{name} {format(value, spec)}{unit}"


def _evaluated(metrics: Record, first: Record | None) -> dict[str, str]:
    """Return a text such as `mean@4 0.350 -> 0.960 (2 failed)` for each dataset, by its name."""
    texts = {}
    for key, value in metrics.items():
        name, _, metric = key.removeprefix("eval/").rpartition("/")
        if metric.startswith("mean@"):
            before = (first or {}).get(key)
            texts[name] = f"{metric} " + (f"{before:.3f} -> " if before is not None else "") + f"{value:.3f}"
        elif metric == "num_failed" and value:
            texts[name] += f" ({value:.0f} failed)"
    return texts


def _duration(seconds: float) -> str:
    """Format seconds as `4 s`, `3:07` or `2:03:07`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """Return `values` as a line of bar characters, at most `width` long; if there are more values, averages over equal intervals.

    Args:
        values: finite numbers, oldest first.
        width: characters.
        low: value of the lowest bar (default: the smallest value).
        high: value of the highest bar (default: the largest value).
    """
    points = _shorten(values, width)
    if not points:
        return ""
    bottom = min(points) if low is None else low
    span = (max(points) if high is None else high) - bottom
    if span <= 0:
        return _BARS[0] * len(points)
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(0, round((point - bottom) / span * top)))] for point in points)


def _shorten(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [position * len(values) // width for position in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]


@dataclass(slots=True, frozen=True)
class Answer:
    """Response, and whether it is correct."""

    text: str
    right: bool


@dataclass(slots=True, frozen=True)
class BeforeAfter:
    """Held-out prompt with a response from before and one from after training."""

    prompt: str
    label: str
    before: Answer
    after: Answer


def before_after_table(rows: Sequence[BeforeAfter]) -> Table:
    """Return a table of answers before and after training.

    Correct answers are green with a check mark, wrong ones red with a cross, so that the table is readable without colors.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("prompt", overflow="fold", ratio=3)
    table.add_column("before", overflow="fold", ratio=2)
    table.add_column("after", overflow="fold", ratio=2)
    table.add_column("label", overflow="fold", justify="right")
    for row in rows:
        table.add_row(Text(_one_line(row.prompt)), _answer(row.before), _answer(row.after), Text(row.label))
    return table


def _answer(answer: Answer) -> Text:
    mark, style = ("✓", "green") if answer.right else ("✗", "red")
    return Text(f"{mark} {_one_line(answer.text) or '(nothing)'}", style=style)


def _one_line(text: str) -> str:
    return " ".join(text.split())
