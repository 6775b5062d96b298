"""Process group of a trainer's ranks."""

import functools
import os
import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, TCPStore

from fuligo.formats.private import kernel_cache
from fuligo.limits import num_cores
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.signed_objects import sign_objects


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """Address of the store through which the ranks form their process group."""

    host: str
    port: int
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Secret with which the ranks sign the objects of collectives. They receive it with `Rank.load`, never through the store."""

    def connect(self, *, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
        """Open a new connection to the store, so that a blocking wait does not hold up the users of another connection."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timeout)


@dataclass(slots=True, frozen=True)
class World:
    """This process's place among the ranks. The defaults describe a single rank on a CPU, without a process group."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    objects: dist.ProcessGroup | None = None
    """Gloo group for Python objects; None if there is only one rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over all ranks, on every rank. A collective, which may overwrite `tensor`."""
        if self.size > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in order of rank, on rank 0; None on other ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.objects)
        return values


def set_environment(settings: TrainerSettings) -> None:
    """Set the environment variables that the trainer's device needs, unless the user has set them."""
    for name, value in settings.environment.items():
        os.environ.setdefault(name, value)
    if settings.device == "cuda" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kernel_cache())


def join_world(rank: int, size: int, device_type: str, *, store: Store, key: bytes | None, timeout_s: float) -> World:
    """Form the process group with the other ranks; return when all have joined.

    Args:
        key: secret with which the ranks sign objects of collectives; None: objects are not signed.
        timeout_s: time limit of joining, and of each collective.

    Raises:
        dist.DistError: a rank did not join in time.
    """
    if device_type == "cpu":
        share_cores(size)
        share_devices()
    device = torch.device(device_type, rank % torch.cuda.device_count()) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # SGLang 0.5.15 sets this for its processes, which receive weights by broadcast. NCCL fails ("invalid argument") if the two ends
        # allocate differently.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    sign_objects(key)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    objects = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)) if size > 1 else None
    return World(rank, size, device, objects)


def leave_world() -> None:
    """Leave the process group, if this process has joined one, and stop signing the objects of collectives."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sign_objects(None)


def share_cores(num_processes: int) -> None:
    """Limit torch's threads to this process's share of the usable cores, because torch ignores a container's CPU quota."""
    torch.set_num_threads(min(torch.get_num_threads(), max(1, num_cores() // num_processes)))


@functools.cache  # else a second call would wrap the first one's function
def share_devices() -> None:
    """Let all gloo groups that this process creates from now on use the same devices.

    By default, each group has devices of its own, and the thread of each looks for messages every 10 ms. A rank of Megatron is in about 20
    groups: on a machine with few cores, their threads would take most of the time of a small model.
    """
    create = ProcessGroupGloo.__init__

    def create_with_shared_devices(
        self: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        options = ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]  # as torch names it
        options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)  # as torch does
        options._timeout = timeout
        create(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = create_with_shared_devices


@functools.cache
def _devices(pid: int, interfaces: str) -> list[ProcessGroupGloo.Device]:
    """Return a device for each network interface that the user named (default: that of the host's name).

    Args:
        pid: this process; after a fork, the threads of its parent's devices are missing.
        interfaces: names, separated by commas.
    """
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
