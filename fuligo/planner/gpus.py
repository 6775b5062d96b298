"""GPUs known to the planner."""

import difflib
from dataclasses import dataclass

from fuligo.errors import ConfigError

MIB = 1024**2
GIB = 1024**3
MEMORY_TOLERANCE = 0.05
"""Largest relative difference between the memory that the driver and CUDA report for one model; variants of a model differ by more."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of a GPU model; the data sheet is named next to each entry."""

    name: str
    """Value of `--gpu`, such as `h100-80`."""
    memory_bytes: int
    """Total reported by CUDA (`torch.cuda.mem_get_info`), below the nominal size and `nvidia-smi`'s. Measured for the H200; for the others
    from PyTorch's out-of-memory messages."""
    bf16_flops: float
    """Dense FLOP/s in bf16."""
    fp8_flops: float
    """Dense FLOP/s in FP8; equal to `bf16_flops` without FP8 support."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth to another GPU of the node, one direction (NVLink, or PCIe without it)."""
    network_bytes_per_s: float
    """Bandwidth to a GPU of another node, one direction."""
    host_bytes_per_s: float
    """Bandwidth to the host's memory, one direction."""
    host_memory_bytes: int
    """Host memory per GPU in the vendor's own servers."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 data sheet (SXM5); DGX H100: eight GPUs, 2 TB, one 400 Gb/s ConnectX-7 each, PCIe 5.0 x16
        Gpu("h100-80", 80998 * MIB, 989.4e12, 1978.9e12, 3.35e12, 450e9, 50e9, 64e9, 256 * GIB),
        # NVIDIA H200 data sheet (SXM5); DGX H200 as DGX H100
        Gpu("h200-141", 143156 * MIB, 989.4e12, 1978.9e12, 4.8e12, 450e9, 50e9, 64e9, 256 * GIB),
        # NVIDIA DGX B200 data sheet, an eighth of it: 36 PFLOPS FP8 dense, 64 TB/s, NVLink 5, 2 TB
        Gpu("b200", 182630 * MIB, 2250e12, 4500e12, 8e12, 900e9, 50e9, 64e9, 256 * GIB),
        # NVIDIA A100 data sheet (SXM4); DGX A100 640GB: 2 TB, one 200 Gb/s ConnectX-6 each, PCIe 4.0 x16
        Gpu("a100-80", 81050 * MIB, 312e12, 312e12, 2.039e12, 300e9, 25e9, 32e9, 256 * GIB),
        # NVIDIA A100 data sheet (SXM4); DGX A100 320GB: 1 TB
        Gpu("a100-40", 40340 * MIB, 312e12, 312e12, 1.555e12, 300e9, 25e9, 32e9, 128 * GIB),
        # NVIDIA L40S data sheet: PCIe 4.0 x16, no NVLink; network of OVX servers, 200 Gb/s per GPU; host: an assumption
        Gpu("l40s", 45460 * MIB, 362.05e12, 733e12, 0.864e12, 32e9, 25e9, 32e9, 64 * GIB),
        # NVIDIA Ada architecture white paper (FP32 accumulation): PCIe 4.0 x16, no NVLink; network and host: assumptions
        Gpu("rtx-4090", 24210 * MIB, 165.2e12, 330.3e12, 1.008e12, 32e9, 1.5e9, 32e9, 32 * GIB),
    )
}


def known_gpu(device: str, memory_bytes: int) -> Gpu | None:
    """Return the figures of a GPU by the name and memory that its driver reports (`NVIDIA H200`); None if it is unknown."""
    words = device.lower().replace("-", " ").split()
    for known in GPUS.values():
        model = known.name.removeprefix("rtx-").partition("-")[0]
        if model in words and abs(memory_bytes / known.memory_bytes - 1) < MEMORY_TOLERANCE:
            return known
    return None


def gpu(name: str) -> Gpu:
    """Return the figures of a GPU by its name, in any case. Raises ConfigError if the GPU is unknown."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in GPUS:
        return GPUS[key]
    close = difflib.get_close_matches(key, GPUS, n=1, cutoff=0.4)
    guess = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"--gpu {name} is unknown; {guess}use one of {', '.join(GPUS)}")
