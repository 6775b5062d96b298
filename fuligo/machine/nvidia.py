"""GPUs of this machine as `nvidia-smi` reports them, also without a CUDA build of torch."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import combinations

TIMEOUT_S = 20.0
GPU_QUERY = ("--query-gpu=index,name,memory.total,driver_version,memory.used", "--format=csv,noheader,nounits")
LINKS_QUERY = ("topo", "-m")
PEERS_QUERY = ("topo", "-p2p", "r")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
GIB = 1024**3
IDLE_BYTES = 2 * GIB
"""Memory in use up to which a GPU counts as free: a display and the contexts of idle processes need some."""
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU as `nvidia-smi` lists it."""

    index: int
    name: str
    memory_bytes: int
    driver: str
    used_bytes: int = 0
    """Memory that all processes use; 0 if the driver does not report it."""

    @property
    def occupied_warning(self) -> str | None:
        """Warning that other processes already use more than `IDLE_BYTES` of the GPU; None if they do not. Read it before a run starts."""
        if self.used_bytes <= IDLE_BYTES:
            return None
        return (
            f"{self.used_bytes / GIB:.1f} of its {self.memory_bytes / GIB:.1f} GiB are in use, but a plan counts them as free: a run may "
            "exhaust the memory, and an engine allocates a smaller KV cache; end the processes that use it (nvidia-smi lists them), or "
            "choose other GPUs with CUDA_VISIBLE_DEVICES"
        )


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs, and the connection between each pair."""

    devices: tuple[Gpu, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    """[n][n] matrix of `nvidia-smi topo -m`: NV18 is 18 NVLinks; SYS, NODE, PHB, PXB, PIX are paths over PCIe."""
    peers: tuple[tuple[str, ...], ...] = ()
    """[n][n] matrix of `nvidia-smi topo -p2p r`: OK if the pair has peer access (one GPU can read the other's memory)."""

    def without_nvlink(self, count: int) -> list[tuple[int, int]]:
        """Return the pairs among the first `count` GPUs that are connected only over PCIe."""
        return [(a, b) for a, b in _pairs(self.links, count) if not self.links[a][b].startswith("NV")]

    def without_peer_access(self, count: int) -> list[tuple[int, int]]:
        """Return the pairs among the first `count` GPUs without peer access."""
        return [(a, b) for a, b in _pairs(self.peers, count) if self.peers[a][b] != "OK"]


def read_gpus() -> Gpus:
    """Return the GPUs and their connections; without a driver, no GPUs, and with fewer than two, no connections."""
    devices = parse_devices(nvidia_smi(*GPU_QUERY))
    if len(devices) < 2:
        return Gpus(devices)
    return Gpus(devices, parse_matrix(nvidia_smi(*LINKS_QUERY)), parse_matrix(nvidia_smi(*PEERS_QUERY)))


def parse_devices(text: str) -> tuple[Gpu, ...]:
    """Parse lines such as `0, NVIDIA H200, 143771, 580.159.04, 4`; skip others, such as messages of a broken driver."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(
        Gpu(int(row[0]), row[1], int(row[2]) * _MIB, row[3], int(row[4]) * _MIB if row[4].isdigit() else 0)
        for row in rows
        if len(row) == 5 and row[0].isdigit() and row[2].isdigit()
    )


def parse_matrix(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse the rows and columns GPU0 .. GPUn-1 of a topology matrix; return an empty matrix if the text has none."""
    rows = [_COLORS.sub("", line).split() for line in text.splitlines()]
    gpus = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and not re.fullmatch(r"GPU\d+", row[1])]
    return tuple(tuple(row[1 : len(gpus) + 1]) for row in gpus)


def _pairs(matrix: tuple[tuple[str, ...], ...], count: int) -> list[tuple[int, int]]:
    return list(combinations(range(min(count, len(matrix))), 2))


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it is not installed or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
