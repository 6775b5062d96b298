"""Progress on the console during a run: a live panel on a terminal, otherwise one line per step, or nothing."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
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
from fuligo.types import Sample, SampleGroup

REFRESH_PER_S = 4
MAX_SIMILAR = 3
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
    """Show warnings while a run is set up, until its progress display shows them; none in mode `none`."""
    return nullcontext() if mode == "none" else warnings_shown_on(Console(highlight=False))


def show_origin(mode: str, checkpoint: Path, step: int, num_rollout: int, console: Console | None = None) -> None:
    """Show from which checkpoint and after how many rollouts a run resumes, before its progress display starts; nothing in mode `none`."""
    if mode != "none":
        console = console or Console(highlight=False)
        console.print(f"resuming from {checkpoint}, after {step} of {count(num_rollout, 'rollout')}", markup=False, soft_wrap=True)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._num_similar: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        place = f"{record.name}:{record.lineno}"
        self._num_similar[place] += 1
        if self._num_similar[place] > MAX_SIMILAR:
            return
        last = " (further warnings of this kind are in log.txt only)" if self._num_similar[place] == MAX_SIMILAR else ""
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        self._console.print(Text.assemble((record.levelname.lower(), style), f": {record.getMessage()}{last}"), soft_wrap=True)


class Progress:
    """Display of a run's phases and steps, as a context manager, so that it can restore the terminal. This base class shows only warnings.

    Args:
        console: console that shows the display and warnings; None: nothing is shown
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._shown = ExitStack()

    def __enter__(self) -> Self:
        if self._console is not None:
            self._shown.enter_context(warnings_shown_on(self._console))
        return self

    def __exit__(self, *exception: object) -> None:
        self._shown.close()

    def phase(self, name: str, step: int) -> None:
        """Show that a phase begins (called by `Trace`)."""

    def record(self, record: Record) -> None:
        """Show that a step is complete."""

    def evaluation(self, num_rollouts: int, metrics: Record, first: Record | None) -> None:
        """Show the metrics `eval/*` after `num_rollouts` rollouts next to those of the run's first evaluation."""


def open_progress(
    mode: Literal["auto", "rich", "plain", "none"], title: str, num_rollouts: int, *, start: int = 0, console: Console | None = None
) -> Progress:
    """Return the progress display of a mode, on standard output by default; auto is rich on a terminal and plain elsewhere."""
    if mode == "none":
        return Progress()
    console = console or Console(highlight=False)
    if mode == "rich" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console, title, num_rollouts, start=start)
    return PlainProgress(console, num_rollouts)


class PlainProgress(Progress):
    """Progress as one line per step, for logs and pipes."""

    def __init__(self, console: Console, num_rollouts: int) -> None:
        super().__init__(console)
        self._num_rollouts = num_rollouts
        self._print = partial(console.print, markup=False, highlight=False, soft_wrap=True)

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
            _skipped(record),
            _field(record, "tokens/s", "rollout/tokens_per_s", ",.0f"),
            _field(record, "s", "perf/step_s", ".2f"),
        ]
        self._print("  ".join(field for field in fields if field))

    def evaluation(self, num_rollouts: int, metrics: Record, first: Record | None) -> None:
        for name, text in _evaluated(metrics, first).items():
            self._print(f"eval {num_rollouts}/{self._num_rollouts}  {name}  {text}")


class LiveProgress(Progress):
    """Progress as a panel of a few lines, at most 100 columns wide, redrawn in place. Its last state stays on the terminal."""

    def __init__(
        self, console: Console, title: str, num_rollouts: int, *, start: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console)
        self._live = Live(self, console=console, refresh_per_second=REFRESH_PER_S, redirect_stdout=True, redirect_stderr=True)
        self._title = title
        self._num_rollouts = num_rollouts
        self._start = start
        self._clock = clock
        self._reward: list[float] = []
        self._length: list[float] = []
        self._latest: Record = {}
        self._evaluated: dict[str, str] = {}
        """Latest evaluation as text, by name of the dataset."""
        self._doing: tuple[str, int] | None = None
        """Phase that began last, and its step; None before the first one and after the run."""
        self._begun_s = self._doing_since_s = clock()

    def __enter__(self) -> Self:
        self._shown.enter_context(self._live)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self._doing = None
        super().__exit__(*exception)

    def phase(self, name: str, step: int) -> None:
        self._doing, self._doing_since_s = (name, step), self._clock()

    def record(self, record: Record) -> None:
        self._latest = record
        for values, key in ((self._reward, "rollout/reward_mean"), (self._length, "rollout/response_len_mean")):
            if math.isfinite(record.get(key, math.nan)):
                values.append(record[key])

    def evaluation(self, num_rollouts: int, metrics: Record, first: Record | None) -> None:
        self._evaluated = _evaluated(metrics, first)

    @property
    def _num_done(self) -> int:
        """Number of complete rollouts."""
        return self._latest["step"] + 1 if self._latest else self._start

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 100)
        yield self._header(width)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=6)
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=width - 10)
        curve_width = max(8, width - 34)
        low, high = min([0.0, *self._reward]), max([1.0, *self._reward])
        grid.add_row("reward", _curve(self._reward, ".3f", curve_width, "green", low=low, high=high))
        grid.add_row("length", _curve(self._length, ".1f", curve_width, "cyan", low=0.0))
        for name, text in self._evaluated.items():
            grid.add_row("eval", f"{name}  {text}")
        parts = [
            _field(self._latest, "", "rollout/tokens_per_s", ",.0f", " tokens/s sampled"),
            _field(self._latest, "", "train/tokens_per_s", ",.0f", " trained"),
            _field(self._latest, "", "perf/step_s", ".2f", " s per step"),
        ]
        if skipped := _skipped(self._latest):
            grid.add_row("train", skipped)
        grid.add_row("speed", Text(" · ".join(part.strip() for part in parts if part) or "-"))
        grid.add_row("now", self._now())
        yield grid

    def _header(self, width: int) -> Text:
        done, here = self._num_done, self._num_done - self._start
        right = f"step {done}/{self._num_rollouts}"
        if here and done < self._num_rollouts:  # the pace is known
            left_s = (self._clock() - self._begun_s) / here * (self._num_rollouts - done)
            right += f"  {_duration(left_s)} left"
        left = Text("fuligo  ", style="bold").append(self._title, style="not bold")
        left.truncate(max(8, width - len(right) - 2), overflow="ellipsis")
        return left.append(" " * max(2, width - left.cell_len - len(right))).append(right, style="not bold")

    def _now(self) -> Text:
        if self._doing is None:
            return Text("done" if self._num_done >= self._num_rollouts else "stopped" if self._latest else "starting")
        name, step = self._doing
        of_step = f", step {step + 1}" if name in _OF_A_STEP else ""
        elapsed = _duration(self._clock() - self._doing_since_s)
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


def _skipped(record: Record) -> str:
    """Return which samples were left out and why: `skipped 25% of samples (advantage 0)`; "" if none were."""
    share, num_steps = record.get("train/skipped_share"), record.get("train/num_skipped_steps")
    if not share:
        return ""
    if share == 1:
        return "skipped training (all advantages are 0)"
    steps = f" and {count(num_steps, 'optimizer step')}" if num_steps else ""
    return f"skipped {share:.0%} of samples{steps} (advantage 0)"


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
    """Return finite values, oldest first, as a line of bars, at most `width` long; if there are more values, averages over equal intervals.

    The lowest bar is at `low` (default: the smallest value), the highest at `high` (default: the largest value).
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


def before_after_table(before: Sequence[SampleGroup], after: Sequence[SampleGroup]) -> Table:
    """Return a table of the first answer to each prompt before and after training.

    Correct answers are green with a check mark, wrong ones red with a cross, so that the table is readable without colors.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("prompt", overflow="fold", ratio=3)
    table.add_column("before", overflow="fold", ratio=2)
    table.add_column("after", overflow="fold", ratio=2)
    table.add_column("label", overflow="fold", justify="right")
    for first, last in ((first.samples[0], last.samples[0]) for first, last in zip(before, after, strict=True)):
        prompt = first.prompt if isinstance(first.prompt, str) else first.prompt[-1]["content"]
        table.add_row(Text(_one_line(prompt)), _answer(first), _answer(last), Text(str(first.label)))
    return table


def _answer(sample: Sample) -> Text:
    mark, style = ("✓", "green") if sample.reward_value() == 1 else ("✗", "red")
    return Text(f"{mark} {_one_line(sample.response) or '(nothing)'}", style=style)


def _one_line(text: str) -> str:
    return " ".join(text.split())
