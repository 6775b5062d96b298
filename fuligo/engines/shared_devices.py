"""Contract between the engines, the weight sync and whoever shares devices between a trainer and engines (--colocate)."""

from __future__ import annotations

from typing import Protocol

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup


class SharedDevices(Protocol):
    """Devices that a trainer and engines use in turns; `job.colocated.ColocatedDevices` implements it."""

    async def to_engines(self) -> None:
        """Offload the trainer and give the engines, which hold the current weights, their KV cache."""
        ...

    async def make_room(self) -> None:
        """Offload the trainer so that engines can start in its turn; return when those that are starting are up."""
        ...

    async def wait_for_room(self) -> None:
        """Return when an engine may start: it sizes its cache by the free memory, so the trainer must hold none."""
        ...

    async def align(self, client: InferenceEngine, group: EngineGroup) -> None:
        """Release the memory of a restarted engine that the other engines of its group have released.

        Raises:
            EngineError: the engine does not release it
        """
        ...
