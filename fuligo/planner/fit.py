"""Comparison of a run's memory with its GPUs and hosts, and findings where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuligo.config.findings import Finding, Severity
from fuligo.planner.gpus import GIB
from fuligo.planner.lengths import longest_sample
from fuligo.planner.plan import EngineCapacity, MemoryBar
from fuligo.planner.subject import Subject
from fuligo.quantities import gibibytes

TRAINER, ENGINE, HOST = "PLAN-MEMORY-TRAINER", "PLAN-MEMORY-ENGINE", "PLAN-MEMORY-HOST"


def memory_findings(
    subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity], *, host_memory_given: bool
) -> Iterator[Finding]:
    """Yield a finding for each kind of memory that does not fit: errors for GPUs and for a given host memory, else a warning."""
    gpus = f"--gpu {subject.gpu.name}"
    trainer = [bar for bar in bars if bar.pipeline_rank is not None and not bar.fits]
    if trainer:
        worst = max(trainer, key=lambda bar: bar.used_bytes)
        flags = (*_trainer_flags(subject), "--gpu")
        yield Finding(TRAINER, Severity.ERROR, f"{_needs(worst)}, more than the {gibibytes(worst.capacity_bytes)} of {gpus}.", flags)
    engine = list(_engine_problems(subject, bars, capacities, gpus))
    if engine:
        yield Finding(ENGINE, Severity.ERROR, " ".join(engine), subject.config.engine_capabilities.memory_flags)
    host = [bar for bar in bars if bar.owner == "host" and not bar.fits]
    if host:
        severity = Severity.ERROR if host_memory_given else Severity.WARNING
        where = "--host-memory" if host_memory_given else f"standard nodes with {subject.gpu.name}"
        text = f"{_needs(host[0])} of a node's memory, more than the {gibibytes(host[0].capacity_bytes)} of {where}."
        yield Finding(HOST, severity, text, _host_flags(host[0]), advice=_host_advice(host[0]))


def fits(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity]) -> bool:
    """Return whether every GPU's peak fits and every engine holds at least one longest sample."""
    return all(bar.fits for bar in bars if bar.owner != "host") and all(_holds_one(subject, capacity) for capacity in capacities)


def lacking_bytes(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity], *, host_memory_given: bool) -> float:
    """Return the bytes missing on all kinds of GPUs together (and on the host if its memory was given); 0 if the run fits.

    A cache too small for one sample counts as one GiB.
    """
    excess = sum(max(0, bar.used_bytes - bar.capacity_bytes) for bar in bars if bar.owner != "host" or host_memory_given)
    return excess + GIB * sum(not _holds_one(subject, capacity) for capacity in capacities)


def engines_fit(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity]) -> bool:
    """Return whether the engines alone fit."""
    return fits(subject, [bar for bar in bars if bar.engine_group is not None], capacities)


def _holds_one(subject: Subject, capacity: EngineCapacity) -> bool:
    return capacity.concurrent_sequences >= 1


def _engine_problems(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity], gpus: str) -> Iterator[str]:
    for bar in bars:
        if bar.engine_group is not None and bar.pipeline_rank is None and not bar.fits:
            yield f"{_needs(bar)}, more than the {gibibytes(bar.capacity_bytes)} of {gpus}."
    owners = {bar.engine_group: bar.owner for bar in bars if bar.engine_group is not None}
    for capacity in capacities:
        if not _holds_one(subject, capacity):
            yield (
                f"{owners.get(capacity.group, 'engines')}: the weights leave {capacity.kv_cache_tokens} tokens of KV cache, "
                f"but one sample may take {longest_sample(subject.config)}."
            )


def _needs(bar: MemoryBar) -> str:
    largest = sorted(bar.items, key=lambda item: -item.num_bytes)[:3]
    named = ", ".join(f"{item.name} {gibibytes(item.num_bytes)}" for item in largest)
    return f"{bar.owner}: needs {gibibytes(bar.used_bytes)} ({named})"


def _host_flags(bar: MemoryBar) -> tuple[str, ...]:
    return ("--rollout-batch-size", "--rollout-max-response-len") if _is_mostly_samples(bar) else ("--optimizer-cpu-offload", "--colocate")


def _host_advice(bar: MemoryBar) -> str:
    if _is_mostly_samples(bar):
        return (
            "Use nodes with more memory, or rollouts of fewer tokens (--rollout-batch-size, --rollout-max-response-len). More nodes do not "
            "help: the first node holds all samples, with every token's experts if routing is replayed."
        )
    return "Use nodes with more memory, or spread the trainer over more nodes (--actor-num-nodes)."


def _is_mostly_samples(bar: MemoryBar) -> bool:
    """Return whether samples are the largest part of the host's memory."""
    return max(bar.items, key=lambda item: item.num_bytes).name in ("samples", "batches")


def _trainer_flags(subject: Subject) -> tuple[str, ...]:
    if subject.config.resolved_train_backend == "torch":
        return ("--actor-num-gpus-per-node", "--max-tokens-per-gpu")
    return ("--tensor-model-parallel-size", "--recompute-granularity", "--max-tokens-per-gpu")
