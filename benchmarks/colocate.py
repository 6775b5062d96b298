"""Time to offload a trainer to host memory and to load it back: through pinned host memory, compared with `tensor.to`, in one process.

python benchmarks/colocate.py --gib 40                    # on a GPU
python benchmarks/colocate.py --device cpu --gib 0.25     # copies within host memory, as a functional check
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuligo.trainer.host_memory import HostMemory

GIB = 1 << 30
TENSOR_BYTES = 64 << 20
"""Size of a tensor: about one matrix of a 4B model in float32."""


@dataclass(slots=True, frozen=True)
class Round:
    """Results of one offload and onload."""

    offload_s: float
    onload_s: float
    device_bytes_away: int
    """Device memory that PyTorch still holds while the tensors are offloaded, in bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gib", type=float, default=8.0, help="size of weights, reference and optimizer states together")
    parser.add_argument("--rounds", type=int, default=4, help="at least 2; the first round allocates memory and is not counted")
    options = parser.parse_args()
    device = torch.device(options.device)
    tensors = [torch.randn(TENSOR_BYTES // 4, device=device) for _ in range(max(1, int(options.gib * GIB / TENSOR_BYTES)))]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    checksum = sum(float(tensor.double().sum()) for tensor in tensors)

    print(f"{num_bytes / GIB:.2f} GiB in {len(tensors)} tensors on {device}, {_held(device) / GIB:.2f} GiB of the device held")
    first, *pinned = _rounds(options.rounds, device, *_through_host_memory(tensors, device))
    _, *plain = _rounds(options.rounds, device, *_through_to(tensors, device))
    assert sum(float(tensor.double().sum()) for tensor in tensors) == checksum, "the contents have changed"
    for name, rounds in (("host memory", pinned), ("tensor.to", plain)):
        offload, onload = (min(getattr(one, part) for one in rounds) for part in ("offload_s", "onload_s"))
        away = max(one.device_bytes_away for one in rounds)
        print(
            f"{name:12} offload {num_bytes / offload / 1e9:6.1f} GB/s  onload {num_bytes / onload / 1e9:6.1f} GB/s  "
            f"held while offloaded {away / GIB:.2f} GiB"
        )
    print(f"first offload, which allocates and pins host memory: {first.offload_s:.1f} s, {num_bytes / first.offload_s / 1e9:.1f} GB/s")
    for part in ("offload_s", "onload_s"):
        ratio = min(getattr(one, part) for one in plain) / min(getattr(one, part) for one in pinned)
        print(f"{part.removesuffix('_s'):12} {ratio:.2f} x as fast through host memory")


def _through_host_memory(tensors: list[torch.Tensor], device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    memory = HostMemory(device)
    return lambda: memory.take(tensors), memory.give_back


def _through_to(tensors: list[torch.Tensor], device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    def move(to: torch.device) -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to(to, copy=True)

    return lambda: move(torch.device("cpu")), lambda: move(device)


def _rounds(num_rounds: int, device: torch.device, offload: Callable[[], None], onload: Callable[[], None]) -> list[Round]:
    rounds: list[Round] = []
    for _ in range(num_rounds):
        offload_s = _timed(offload, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        away = _held(device)
        rounds.append(Round(offload_s, _timed(onload, device), away))
    return rounds


def _timed(work: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _held(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
