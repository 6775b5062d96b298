"""Facts about this machine that `fuligo doctor` compares with a config."""

import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from fuligo.limits import available_memory_bytes, memory_bytes, num_cores, raise_open_files
from fuligo.machine.nvidia import Gpus, read_gpus

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Torch:
    """Build and devices of the installed torch."""

    version: str
    cuda: str | None = None
    """CUDA version of the build; None for a CPU build."""
    nccl: str | None = None
    """NCCL version; None for a build without it."""
    num_devices: int = 0
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software of one node."""

    python: str
    system: str
    """Operating system and architecture, such as `Linux x86_64`."""
    torch: Torch | None
    torch_problem: str | None
    """Reason why torch cannot be imported; None if it can."""
    gpus: Gpus = field(default_factory=Gpus)
    num_cores: int = 1
    """Number of cores that this process may use, by its CPU affinity and its container's quota."""
    memory_bytes: int = 0
    """Memory of the machine, or the limit of the container if that is less."""
    available_memory_bytes: int = 0
    """Memory that can be allocated without swapping, within the limit of the container."""
    shared_memory_bytes: int | None = None
    """Free bytes in /dev/shm; None if it does not exist."""
    num_open_files: int = 1024
    """Largest number of files that a process can open (`ulimit -Hn`); commands raise the soft limit to it."""


def read_machine() -> Machine:
    """Collect the facts about this machine. Imports torch, which takes seconds, and raises this process's limit of open files."""
    torch, problem = _torch()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch,
        torch_problem=problem,
        gpus=read_gpus(),
        num_cores=num_cores(),
        memory_bytes=memory_bytes(),
        available_memory_bytes=available_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        num_open_files=raise_open_files(),
    )


def _torch() -> tuple[Torch | None, str | None]:
    try:
        import torch
        from torch.cuda import nccl
    except Exception as error:  # a broken build may raise anything
        return None, f"{type(error).__name__}: {error}"
    with_cuda = torch.version.cuda is not None
    nccl_version = ".".join(map(str, nccl.version())) if with_cuda and torch.distributed.is_nccl_available() else None
    num_devices = torch.cuda.device_count() if with_cuda else 0
    return Torch(torch.__version__, torch.version.cuda, nccl_version, num_devices, torch.get_num_threads()), None
