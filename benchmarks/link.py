"""Bandwidth of an NCCL broadcast between the GPUs of this machine: the upper bound of a weight sync by broadcast.

    python benchmarks/link.py [--gpus 2] [--gib 1]

Measures the broadcast of a tensor from rank 0, as `fuligo/weights/broadcast.py` sends a bucket: the best of ten, after three warm-ups.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

GIB = 2**30


def measure(rank: int, num_gpus: int, num_bytes: int, port: int) -> None:
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_gpus, device_id=device)
    row = torch.full((num_bytes,), rank, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(13):
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        dist.broadcast(row, src=0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    assert not row.any(), "rank 0 sent zeros"
    slowest = torch.tensor(times[3:], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        best_s = float(slowest.min())
        print(
            f"{num_gpus} GPUs: {num_bytes / GIB:.2f} GiB in {best_s * 1e3:.2f} ms, {num_bytes / best_s / 1e9:.0f} GB/s to each", flush=True
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=29533)
    options = parser.parse_args()
    if not 2 <= options.gpus <= torch.cuda.device_count():
        parser.error(
            f"cannot measure with --gpus {options.gpus}: this machine has {torch.cuda.device_count()} GPUs, and a broadcast needs at least "
            "2; choose a number from 2 to all GPUs, or a machine with more"
        )
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # Multicast may not work on shared hosts.
    spawn(measure, (options.gpus, int(options.gib * GIB), options.port), nprocs=options.gpus)


if __name__ == "__main__":
    main()
