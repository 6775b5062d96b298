"""Peak memory of every kind of GPU, and of the host."""

from __future__ import annotations

from fuligo.planner.memory.bars import engine_capacities, memory_bars

__all__ = ["engine_capacities", "memory_bars"]
