"""Estimate of layout, memory and time of a subject."""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.planner.fit import fits, lacking_bytes
from fuligo.planner.layout import make_layout
from fuligo.planner.memory import engine_capacities, memory_bars
from fuligo.planner.plan import ClusterLayout, EngineCapacity, MemoryBar, Phase
from fuligo.planner.roofline import phases, step_seconds
from fuligo.planner.subject import Subject


@dataclass(frozen=True, slots=True)
class Estimate:
    """Numbers of a plan."""

    layout: ClusterLayout
    memory: tuple[MemoryBar, ...]
    capacities: tuple[EngineCapacity, ...]
    phases: tuple[Phase, ...]
    step_s: float
    fits: bool


def estimate(subject: Subject, host_memory_bytes: int | None = None) -> Estimate:
    """Estimate layout, memory and time.

    Raises:
        ConfigError: the sizes allow no layout.
    """
    layout = make_layout(subject)
    bars, capacities = memory_bars(subject, layout, host_memory_bytes), engine_capacities(subject, layout)
    timeline = phases(subject, layout)
    return Estimate(layout, bars, capacities, timeline, step_seconds(timeline), fits(subject, bars, capacities))


def shortfall(subject: Subject, host_memory_bytes: int | None = None) -> float:
    """Return the bytes by which the peaks of all kinds of GPUs (and of the host if its memory is given) exceed their memory; 0 if they fit.

    Raises:
        ConfigError: the sizes allow no layout.
    """
    layout = make_layout(subject)
    bars = memory_bars(subject, layout, host_memory_bytes)
    return lacking_bytes(subject, bars, engine_capacities(subject, layout), host_memory_given=host_memory_bytes is not None)
