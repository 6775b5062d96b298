"""The ranks that train together: their process group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from fuligo.trainer.ranks.settings import TrainerSettings


@dataclass(slots=True, frozen=True)
class World:
    """This process's place among the ranks. A single rank needs no process group unless it computes in half precision."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    objects: dist.ProcessGroup | None = None
    """Gloo group for Python objects; None where there is one rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        if self.size > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, in the order of ranks, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.objects)
        return values


def join_trainer(settings: TrainerSettings, rank: int, size: int, store: Store) -> World:
    """As `join_world`, for a trainer of these settings."""
    for name, value in settings.environment.items():
        os.environ.setdefault(name, value)
    return join_world(rank, size, settings.device, store=store, timeout_s=settings.command_timeout_s)


def join_world(rank: int, size: int, device_type: str, *, store: Store, timeout_s: float) -> World:
    """Form the process group with the other ranks; returns when all are there.

    Raises:
        dist.DistError: a rank did not come in time.
    """
    if device_type == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // size)))
    device = torch.device(device_type, rank % torch.cuda.device_count()) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # SGLang 0.5.15 sets this for its processes. Weights are broadcast to them, and NCCL fails ("invalid argument") where two ends
        # allocate differently.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    objects = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)) if size > 1 else None
    return World(rank, size, device, objects)
