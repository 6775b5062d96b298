"""Whether a run fits the memory it has, and what is said where it does not."""

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
    """What does not fit: an error for GPUs, and for the host where its memory was given, else a warning."""
    gpus = f"--gpu {subject.gpu.name}"
    trainer = [bar for bar in bars if bar.pipeline_rank is not None and not bar.fits]
    if trainer:
        worst = max(trainer, key=lambda bar: bar.used_bytes)
        flags = (*_trainer_flags(subject), "--gpu")
        yield Finding(TRAINER, Severity.ERROR, f"{_told(worst)}, more than the {gibibytes(worst.capacity_bytes)} of {gpus}.", flags)
    engine = list(_engine_problems(subject, bars, capacities, gpus))
    if engine:
        yield Finding(ENGINE, Severity.ERROR, " ".join(engine), _engine_flags(subject))
    host = [bar for bar in bars if bar.owner == "host" and not bar.fits]
    if host:
        severity = Severity.ERROR if host_memory_given else Severity.WARNING
        where = "--host-memory" if host_memory_given else f"nodes as they are sold with {subject.gpu.name}"
        text = f"{_told(host[0])} of a node's memory, more than the {gibibytes(host[0].capacity_bytes)} of {where}."
        yield Finding(HOST, severity, text, _host_flags(host[0]), advice=_host_advice(host[0]))


def fits(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity]) -> bool:
    """Every GPU's peak fits, and every engine holds at least one sample of the longest kind."""
    return all(bar.fits for bar in bars if bar.owner != "host") and all(_holds_one(subject, capacity) for capacity in capacities)


def lacking_bytes(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity], *, host_memory_given: bool) -> float:
    """What is missing on all kinds of GPUs together, and on the host where its memory was given; 0 where the run fits.

    Room for one sample in an engine's cache counts as a GiB: it is missing or not, and weights say by how much.
    """
    excess = sum(max(0, bar.used_bytes - bar.capacity_bytes) for bar in bars if bar.owner != "host" or host_memory_given)
    return excess + GIB * sum(not _holds_one(subject, capacity) for capacity in capacities)


def engines_fit(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity]) -> bool:
    """The same of the engines alone."""
    return fits(subject, [bar for bar in bars if bar.engine_group is not None], capacities)


def _holds_one(subject: Subject, capacity: EngineCapacity) -> bool:
    return capacity.concurrent_sequences >= 1


def _engine_problems(subject: Subject, bars: Sequence[MemoryBar], capacities: Sequence[EngineCapacity], gpus: str) -> Iterator[str]:
    for bar in bars:
        if bar.engine_group is not None and bar.pipeline_rank is None and not bar.fits:
            yield f"{_told(bar)}, more than the {gibibytes(bar.capacity_bytes)} of {gpus}."
    owners = {bar.engine_group: bar.owner for bar in bars if bar.engine_group is not None}
    for capacity in capacities:
        if not _holds_one(subject, capacity):
            yield (
                f"{owners.get(capacity.group, 'engines')}: the weights leave {capacity.kv_cache_tokens} tokens of KV cache, "
                f"and one sample may take {longest_sample(subject.config)}."
            )


def _told(bar: MemoryBar) -> str:
    largest = sorted(bar.items, key=lambda item: -item.num_bytes)[:3]
    named = ", ".join(f"{item.name} {gibibytes(item.num_bytes)}" for item in largest)
    return f"{bar.owner}: needs {gibibytes(bar.used_bytes)} ({named})"


def _host_flags(bar: MemoryBar) -> tuple[str, ...]:
    return ("--rollout-batch-size", "--rollout-max-response-len") if _is_of_samples(bar) else ("--optimizer-cpu-offload", "--colocate")


def _host_advice(bar: MemoryBar) -> str:
    if _is_of_samples(bar):
        return (
            "Take nodes with more memory, or rollouts of fewer tokens (--rollout-batch-size, --rollout-max-response-len): the first node "
            "has all samples, with the experts of every token where routing is replayed, so more nodes do not help."
        )
    return "Take nodes with more memory, or spread the trainer over more nodes (--actor-num-nodes)."


def _is_of_samples(bar: MemoryBar) -> bool:
    """They are its largest part."""
    return max(bar.items, key=lambda item: item.num_bytes).name in ("samples", "batches")


def _trainer_flags(subject: Subject) -> tuple[str, ...]:
    if subject.config.resolved_train_backend == "torch":
        return ("--actor-num-gpus-per-node", "--max-tokens-per-gpu")
    return ("--tensor-model-parallel-size", "--recompute-granularity", "--max-tokens-per-gpu")


def _engine_flags(subject: Subject) -> tuple[str, ...]:
    if subject.config.resolved_rollout_backend == "embedded":
        return ("--embedded-max-total-tokens",)
    return ("--sglang-mem-fraction-static", "--rollout-num-gpus-per-engine")
