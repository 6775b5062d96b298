"""Estimate of layout, memory and time of a subject, and findings where its memory exceeds that of GPUs or hosts."""

from collections.abc import Iterator
from dataclasses import dataclass

from fuligo.config.findings import Finding, Severity
from fuligo.planner.gpus import GIB
from fuligo.planner.layout import make_layout
from fuligo.planner.lengths import longest_sample
from fuligo.planner.memory.bars import engine_capacities, memory_bars
from fuligo.planner.plan import ClusterLayout, EngineCapacity, MemoryBar, Phase
from fuligo.planner.roofline import phases, step_seconds
from fuligo.planner.subject import Subject
from fuligo.quantities import gibibytes

TRAINER, ENGINE, HOST = "PLAN-MEMORY-TRAINER", "PLAN-MEMORY-ENGINE", "PLAN-MEMORY-HOST"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated layout, memory and time of a run."""

    layout: ClusterLayout
    memory: tuple[MemoryBar, ...]
    capacities: tuple[EngineCapacity, ...]
    phases: tuple[Phase, ...]
    step_s: float

    @property
    def fits(self) -> bool:
        """True if every GPU's peak fits and every engine holds at least one longest sample."""
        return self.engines_fit and all(bar.fits for bar in self.memory if bar.owner != "host")

    @property
    def engines_fit(self) -> bool:
        return all(bar.fits for bar in self.memory if bar.engine_group is not None) and all(each.holds_one for each in self.capacities)


def estimate(subject: Subject, host_memory_bytes: int | None = None) -> Estimate:
    """Estimate layout, memory and time. Raises ConfigError if the sizes allow no layout."""
    layout = make_layout(subject)
    bars, capacities = memory_bars(subject, layout, host_memory_bytes), engine_capacities(subject, layout)
    timeline = phases(subject, layout)
    return Estimate(layout, bars, capacities, timeline, step_seconds(timeline))


def shortfall(subject: Subject, host_memory_bytes: int | None = None) -> float:
    """Return the bytes that exceed the memory of each kind of GPU (and of the host if its memory is given), summed; 0 if everything fits.

    A KV cache too small for one sample counts as one GiB. Raises ConfigError if the sizes allow no layout.
    """
    layout = make_layout(subject)
    bars = [bar for bar in memory_bars(subject, layout, host_memory_bytes) if bar.owner != "host" or host_memory_bytes is not None]
    excess = sum(max(0, bar.used_bytes - bar.capacity_bytes) for bar in bars)
    return excess + GIB * sum(not capacity.holds_one for capacity in engine_capacities(subject, layout))


def memory_findings(subject: Subject, numbers: Estimate, *, host_memory_given: bool) -> Iterator[Finding]:
    """Yield a finding for each kind of memory that does not fit: errors for GPUs and for a given host memory, else a warning."""
    config, gpus = subject.config, f"one {subject.gpu.name} GPU"
    if trainer := [bar for bar in numbers.memory if bar.pipeline_rank is not None and not bar.fits]:
        worst = max(trainer, key=lambda bar: bar.used_bytes)
        yield Finding(TRAINER, Severity.ERROR, f"{_excess(worst, of=gpus)}.", config.trainer_capabilities.memory_flags)
    engines = {bar.engine_group: bar for bar in numbers.memory if bar.engine_group is not None}
    problems = [f"{_excess(bar, of=gpus)}." for bar in engines.values() if bar.pipeline_rank is None and not bar.fits]
    problems += [
        f"{engines[each.group].owner if each.group in engines else 'engines'}: the weights leave {each.kv_cache_tokens} tokens of KV "
        f"cache, but one sample may take {longest_sample(config)}."
        for each in numbers.capacities
        if not each.holds_one
    ]
    if problems:
        yield Finding(ENGINE, Severity.ERROR, " ".join(problems), config.engine_capabilities.memory_flags)
    if (host := next((bar for bar in numbers.memory if bar.owner == "host" and not bar.fits), None)) is not None:
        severity = Severity.ERROR if host_memory_given else Severity.WARNING
        where = "--host-memory" if host_memory_given else f"standard nodes with {subject.gpu.name}"
        flags = ("--optimizer-cpu-offload", "--colocate")
        advice = "Use nodes with more memory, or spread the trainer over more nodes (--actor-num-nodes)."
        if max(host.items, key=lambda item: item.num_bytes).name in ("samples", "batches"):
            flags = ("--rollout-batch-size", "--rollout-max-response-len")
            advice = (
                "Use nodes with more memory, or rollouts of fewer tokens (--rollout-batch-size, --rollout-max-response-len). More nodes do "
                "not help: the first node holds all samples, with every token's experts if routing is replayed."
            )
        text = _excess(host, of=where, what=" of a node's memory")
        yield Finding(HOST, severity, f"{text}.", flags, advice=advice)


def _excess(bar: MemoryBar, *, of: str, what: str = "") -> str:
    """Return the text for a bar that exceeds the capacity `of` its GPUs or nodes, with the largest items."""
    largest = sorted(bar.items, key=lambda item: -item.num_bytes)[:3]
    named = ", ".join(f"{item.name} {gibibytes(item.num_bytes)}" for item in largest)
    return f"{bar.owner}: needs {gibibytes(bar.used_bytes)} ({named}){what}, more than the {gibibytes(bar.capacity_bytes)} of {of}"
