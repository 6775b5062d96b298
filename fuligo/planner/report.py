"""Plan as text: placement, memory, one step, findings. Bars are colored blocks, or letters without color."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from fuligo.config import Config
from fuligo.config.changes import change_text
from fuligo.config.findings import Finding, Severity
from fuligo.planner.plan import ClusterLayout, Disk, EngineCapacity, MemoryBar, Plan
from fuligo.quantities import amount, as_typed, count, gibibytes, magnitude, ranges, seconds

_MAX_WIDTH = 120
_MIN_BAR = 10
_SHOWN_SHARE = 0.001
"""Share of the host's memory below which the host is not shown."""
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow"}


def gpu_hours(step_s: float, config: Config) -> str:
    """Return the cost of the run, such as `; 100 of them on 8 GPUs, about 12 GPU hours`; empty if the number of rollouts is unknown.

    It covers steps of `step_s` seconds, without loading, evaluations and saves.
    """
    num_rollouts, num_gpus = config.data.num_rollout, config.total_num_gpus
    if num_rollouts is None or not num_gpus:
        return ""
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus:,} GPUs"
    hours = step_s * num_rollouts * num_gpus / 3600
    cost = "less than 0.1" if hours < 0.1 else f"about {hours:,.0f}" if hours >= 100 else f"about {hours:.3g}"
    return f"; {num_rollouts:,} of them on {gpus}, {cost} GPU hours"


def print_report(plan: Plan, config: Config, console: Console, notes: Sequence[str] = ()) -> None:
    """Print the report of a plan, and the notes of the command-line parser."""
    width = min(console.width, _MAX_WIDTH) - 2
    colored = console.is_terminal and not console.no_color
    console.print(_headline(plan))
    if plan.layout is not None:
        _section(console, "Where", [*_trainer(plan.layout), *_engines(plan.layout, plan.capacities), *_disk(plan.disk)])
    if plan.choices:
        options = [as_typed(change_text(change, config) for change in choice.changes) for choice in plan.choices]
        lines = [Text.assemble((each, "green"), f"  {choice.reason}") for each, choice in zip(options, plan.choices)]
        _section(console, "Chosen for flags that are not given", lines)
    if plan.memory:
        _section(console, "Memory", _memory(plan.memory, width, colored))
    if plan.phases:
        _section(console, f"One step, about {seconds(plan.step_s)}{gpu_hours(plan.step_s, config)}", _step(plan, width, colored))
    if plan.findings or notes:
        _section(console, "Findings", [*_findings(plan.findings, config), *(Text(f"note: {note}") for note in notes)])
    if plan.suggestions:
        gains = [f"{gibibytes(each.saved_bytes)} less, " if each.saved_bytes > 0 else "" for each in plan.suggestions]
        lines = [Text.assemble((as_typed(each.flags), "green"), f"  {gain}{each.cost}") for each, gain in zip(plan.suggestions, gains)]
        _section(console, "Changes that make it fit, cheapest first", lines)
    console.print()
    console.print(_verdict(plan))


def _section(console: Console, title: str, lines: Iterable[RenderableType]) -> None:
    console.print()
    console.print(Text(title, "bold"))
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _headline(plan: Plan) -> Text:
    facts = [plan.model_type, f"{magnitude(plan.num_parameters)} parameters"]
    if plan.num_active_parameters != plan.num_parameters:
        facts.append(f"{magnitude(plan.num_active_parameters)} active")
    if plan.num_adapter_parameters:
        facts.append(f"an adapter of {magnitude(plan.num_adapter_parameters)}")
    if plan.layout is None:
        facts.append(plan.gpu)
    else:
        total = len(plan.layout.gpus)
        used = sum(gpu.trainer is not None or gpu.engine is not None for gpu in plan.layout.gpus)
        of_total = "" if used == total else f" of {total}"
        facts.append(f"{used}{of_total} x {plan.gpu} on {count(plan.layout.num_nodes, 'node')}")
    return Text.assemble((plan.name, "bold"), "  ", ", ".join(facts))


def _trainer(layout: ClusterLayout) -> Iterator[Text]:
    gpus = [gpu for gpu in layout.gpus if gpu.trainer is not None]
    if not gpus:
        return
    # Without experts ETP equals TP and is not worth showing.
    etp = layout.etp if layout.ep > 1 or layout.etp != layout.tp else 1
    sizes = _sizes(TP=layout.tp, CP=layout.cp, PP=layout.pp, DP=layout.dp, EP=layout.ep, ETP=etp)
    nodes = ranges(gpu.node for gpu in gpus)
    yield _labeled("trainer", f"{count(len(gpus), 'GPU')}, {_plural(nodes, 'node')} {nodes}{sizes}")
    if layout.pp > 1:
        by_rank = [
            list(chunks)
            for _, chunks in groupby(sorted(layout.stages, key=lambda s: (s.pipeline_rank, s.virtual_rank)), lambda s: s.pipeline_rank)
        ]
        yield _labeled("stages", "layers " + " | ".join("+".join(str(stage.num_layers) for stage in chunks) for chunks in by_rank))
        if any(stage.index_layers for stage in layout.stages):
            counts = " | ".join(str(sum(len(stage.index_layers) for stage in chunks)) for chunks in by_rank)
            yield _labeled("", f"layers with their own sparse index: {counts}")


def _engines(layout: ClusterLayout, capacities: Sequence[EngineCapacity]) -> Iterator[Text]:
    for index, group in enumerate(layout.engine_groups):
        nodes = ranges(gpu.node for gpu in layout.gpus if gpu.engine is not None and gpu.engine.group == index)
        several_models = len({other.model for other in layout.engine_groups}) > 1
        model = f" of {group.model}" if several_models else ""
        if group.worker_type == "placeholder":
            text = f"{count(group.num_gpus, 'GPU')} kept free"
        else:
            sizes = _sizes(TP=group.tp, PP=group.pp, DP=group.dp, EP=group.ep)
            engines = f"{count(group.num_engines, f'{group.worker_type} engine')}{model} x {count(group.num_gpus_per_engine, 'GPU')}"
            text = f"{engines}, {_plural(nodes, 'node')} {nodes}{sizes}"
        yield _labeled("engines" if index == 0 else "", text)
        found = [capacity for capacity in capacities if capacity.group == index]
        for capacity in found:
            held = f"each holds {magnitude(capacity.kv_cache_tokens)} tokens of KV cache"
            yield _labeled("", f"{held}: {magnitude(capacity.concurrent_sequences)} of the longest sequences at a time")
        if not found and group.worker_type != "placeholder":
            yield _labeled("", "memory and time not estimated: no config.json of this model on this machine")


def _sizes(**sizes: int) -> str:
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f": {shown}" if shown else ""


def _plural(listed: str, noun: str) -> str:
    return noun if listed.isdigit() else f"{noun}s"


def _labeled(label: str, text: str) -> Text:
    return Text.assemble((f"{label:<9}", "bright_black"), text)


def _disk(disk: Disk | None) -> Iterator[Text]:
    if disk is None:
        return
    kinds = (("checkpoint", disk.num_checkpoints, disk.checkpoint_bytes), ("export", disk.num_exports, disk.export_bytes))
    parts = [f"{f'{noun}s' if number is None else count(number, noun)} of {amount(size)}" for noun, number, size in kinds if number != 0]
    yield _labeled("disk", f"at most {' and '.join(parts)}: {amount(disk.used_bytes)}" if disk.is_known else " and ".join(parts))


def _memory(bars: Sequence[MemoryBar], width: int, colored: bool) -> Iterator[Text]:
    bars = _merge_equal_stages([bar for bar in bars if _is_gpu(bar) or _SHOWN_SHARE * bar.capacity_bytes <= bar.used_bytes])
    palette = Palette((item.name for bar in bars for item in bar.items if item.num_bytes), colored=colored)
    labels = [f"{bar.owner}, {count(bar.num_gpus, 'GPU')}" if _is_gpu(bar) else f"{bar.owner}, fullest node" for bar in bars]
    figures = []
    for bar in bars:
        free = bar.capacity_bytes - bar.used_bytes
        rest = f"{gibibytes(free)} free" if bar.fits else f"{gibibytes(-free)} too much"
        figures.append(f"{gibibytes(bar.used_bytes).removesuffix(' GiB')} of {gibibytes(bar.capacity_bytes)}, {rest}")
    label_width = max(map(len, labels)) + 1
    bar_width = max(width - label_width - max(map(len, figures)) - 3, _MIN_BAR)
    gpu_scale = max((max(bar.capacity_bytes, bar.used_bytes) for bar in bars if _is_gpu(bar)), default=0)
    for bar, label, text in zip(bars, labels, figures, strict=True):
        scale = gpu_scale if _is_gpu(bar) else max(bar.capacity_bytes, bar.used_bytes)
        parts = [(item.name, float(item.num_bytes)) for item in bar.items if item.num_bytes]
        drawn = stacked_bar(parts, bar.capacity_bytes, scale, bar_width, palette)
        yield Text.assemble(
            label.ljust(label_width), drawn, " " * (bar_width + 1 - len(drawn)), " ", (text, "" if bar.fits else "bold red")
        )
    yield from palette.legend(width)


def _is_gpu(bar: MemoryBar) -> bool:
    return bar.pipeline_rank is not None or bar.engine_group is not None


def _merge_equal_stages(bars: Sequence[MemoryBar]) -> list[MemoryBar]:
    """Merge neighboring pipeline stages with equal bars into one, such as `trainer stages 1-6`."""
    merged: list[MemoryBar] = []
    for (_, _, first_rank), group in groupby(bars, lambda bar: (bar.items, bar.capacity_bytes, bar.pipeline_rank is None)):
        alike = list(group)
        if first_rank or len(alike) == 1:
            merged += alike
            continue
        ranks = ranges(bar.pipeline_rank for bar in alike if bar.pipeline_rank is not None)
        merged.append(replace(alike[0], owner=f"trainer stages {ranks}", num_gpus=sum(bar.num_gpus for bar in alike)))
    return merged


def _step(plan: Plan, width: int, colored: bool) -> Iterator[Text]:
    palette = Palette((phase.lane for phase in plan.phases), colored=colored)
    label_width = max(len(f"{phase.lane} {phase.name}") for phase in plan.phases) + 1
    bar_width = max(width - label_width - 16, _MIN_BAR)
    end = max(phase.start_s + phase.duration_s for phase in plan.phases) or 1.0
    for phase in plan.phases:
        bar = span_bar(phase.lane, phase.start_s, phase.duration_s, end, bar_width, palette)
        share = f"{phase.duration_s / end:.0%}"
        label = Text.assemble((f"{phase.lane} ", "bright_black"), phase.name)
        label.pad_right(label_width - len(label))
        yield Text.assemble(label, bar, f"{seconds(phase.duration_s):>10}{share:>6}")


def _findings(findings: Sequence[Finding], config: Config) -> Iterator[RenderableType]:
    for finding in findings:
        yield Text.assemble((str(finding.severity), _STYLES[finding.severity]), " ", (finding.id, "bold"), f"  {finding.text}")
        if finding.fix:
            fix = as_typed(change_text(change, config) for change in finding.fix)
            yield Padding(Text.assemble(("fix: ", "green"), fix), (0, 0, 0, 2), expand=False)
        if finding.advice:
            yield Padding(Text(finding.advice), (0, 0, 0, 2), expand=False)


def _verdict(plan: Plan) -> Text:
    errors = [finding for finding in plan.findings if finding.severity is Severity.ERROR]
    num_errors = len(errors)
    num_warnings = len(plan.findings) - num_errors
    warnings = f", {count(num_warnings, 'warning')}" if num_warnings else ""
    if num_errors:
        of_memory = all(finding.id.startswith("PLAN-MEMORY") for finding in errors)
        consequence = f"this run would exceed the memory of {plan.gpu}" if of_memory else "fuligo train would reject this run"
        return Text.assemble((count(num_errors, "error"), "bold red"), f"{warnings}: {consequence}")
    estimates = f"; the times are estimates under {count(len(plan.assumptions), 'assumption')} (listed by --html and --json)"
    return Text.assemble(("valid", "bold green"), warnings, estimates if plan.assumptions else "")


_KNOWN = {
    "weights": ("w", "blue"),
    "draft_weights": ("W", "bright_blue"),
    "engine_weights": ("E", "blue"),
    "gradients": ("g", "cyan"),
    "optimizer": ("o", "yellow"),
    "fp8_weights": ("8", "blue"),
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
    "adapter": ("A", "bright_yellow"),
    "fragmentation": ("f", "white"),
    "engine": ("e", "bright_yellow"),
    "engines": ("e", "green"),
    "trainer": ("t", "bright_cyan"),
    "teacher": ("T", "bright_blue"),
}
"""Letter and color of common memory parts and of the lanes of a step."""
_OTHER_COLORS = ("bright_white", "bright_blue")
_BLOCK = "█"


class Palette:
    """Letter and color of each name."""

    def __init__(self, names: Iterable[str], *, colored: bool) -> None:
        """Assign letters and colors; without color, bars consist of letters."""
        self._colored = colored
        self._letters: dict[str, str] = {}
        self._styles: dict[str, str] = {}
        names = dict.fromkeys(names)
        taken = {_KNOWN[name][0] for name in names if name in _KNOWN}
        others = iter(_OTHER_COLORS * len(names))
        for name in names:
            if name in _KNOWN:
                self._letters[name], self._styles[name] = _KNOWN[name]
                continue
            self._letters[name] = next((letter for letter in name + name.upper() if letter.isalpha() and letter not in taken), "#")
            self._styles[name] = next(others)
            taken.add(self._letters[name])

    def run(self, name: str, length: int) -> Text:
        """Return `length` characters of one part."""
        return Text((_BLOCK if self._colored else self._letters[name]) * length, self._styles[name])

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

    `width` characters represent `scale`, which is at least the capacity and the sum of the parts.
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
