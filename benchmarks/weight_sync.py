"""Time of a weight sync by broadcast to real SGLang engines, by bucket size: GB/s and share of the link.

    python benchmarks/weight_sync.py --engine-python python3 --model MODEL --engines 3        # GPU 0 sends, GPUs 1 to 3 receive
    python benchmarks/weight_sync.py --engine-python .venv-sglang/bin/python --device cpu     # the quickstart's model, by gloo
    python benchmarks/weight_sync.py --engine-python python3 --model MODEL --lora-rank 16     # an adapter of all linear layers, on GPU 0

The sender is the trainer's (`fuligo/weights/senders.py`) with the checkpoint's tensors on its device, so gathering costs nothing. A sync is
paused and resumed as in a run. `--link-gb-per-s` is the bandwidth that `benchmarks/link.py` reports for as many GPUs.

With `--lora-rank`, a LoRA adapter of random values is loaded into the engines in place of the one before (`fuligo/weights/adapter.py`). The
trainer's copy of it is float32 on GPU 0; the first engine is on GPU 1, or on GPU 0 if there is no other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rollout_waves import fleet
from safetensors.torch import load_file
from synthetic_rollout import ASSETS

from fuligo.engines.sglang.backend import adapter_arguments
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.host_copies import host_copies
from fuligo.formats.weight_manifest import EngineAddress, Undelivered, WeightManifest, WeightTarget, weights_checksum
from fuligo.models.adapter import adapter_tensors, empty_adapted_model
from fuligo.weights.adapter import send_adapter
from fuligo.weights.senders import WeightSender

MIB = 2**20


async def measure_adapter(args: argparse.Namespace) -> None:
    """Print the times of syncs of an adapter: its tensors to host memory, its digest alone, and the whole sync."""
    device, config = "cuda:0" if args.device == "cuda" else "cpu", adapter_config(args)
    shapes = {name: parameter.shape for name, parameter in adapter_tensors(empty_adapted_model(config, Path(args.model))).items()}
    trained = {name: 0.01 * torch.randn(shape, device=device) for name, shape in shapes.items()}
    num_bytes = sum(2 * tensor.numel() for tensor in trained.values())
    async with fleet(args) as running:
        print(f"{args.engines} engines ready; adapter of rank {config.rank}: {len(trained)} tensors, {num_bytes / 1e6:.1f} MB", flush=True)
        group, times = running.group, []
        engines = tuple(EngineAddress(c.url, c.num_ranks, c.start, c.number, c.keys, ()) for c in group.clients)
        for version in range(1, args.repeats + 2):
            start_s = time.perf_counter()
            await group.pause("abort")
            paused_s = time.perf_counter()
            tensors = host_copies([(name, tensor.bfloat16()) for name, tensor in trained.items()])
            copied_s = time.perf_counter()
            weights_checksum(tensors)
            digested_s = time.perf_counter()
            sent = await asyncio.to_thread(send_adapter, tensors, config, WeightTarget("tensor", version, MIB, engines))
            sent_s = time.perf_counter()
            await group.resume()
            if not isinstance(sent, WeightManifest):
                raise RuntimeError(sent.reason)
            digest_s = digested_s - copied_s
            # The digest that is timed by itself is computed again as a part of what follows.
            times.append((paused_s - start_s, copied_s - paused_s, digest_s, sent_s - digested_s - digest_s, time.perf_counter() - sent_s))
    for label, parts in (("first", times[:1]), ("later, median", times[1:])):
        medians = [1e3 * statistics.median(values) for values in zip(*parts)]
        names = ("pause", "copy", "digest", "load", "resume")
        print(f"{label}: {sum(medians):.1f} ms (" + ", ".join(f"{name} {ms:.1f}" for name, ms in zip(names, medians)) + ")", flush=True)


def adapter_config(args: argparse.Namespace) -> AdapterConfig:
    return AdapterConfig(rank=args.lora_rank, alpha=32.0)


async def measure(args: argparse.Namespace) -> None:
    device = "cuda:0" if args.device == "cuda" else "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(0)
        os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang sets it, and the trainer
    weights = {name: tensor.to(device) for file in args.files for name, tensor in load_file(file).items()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    started_s = time.perf_counter()
    async with fleet(args) as running:
        print(f"{args.engines} engines ready after {time.perf_counter() - started_s:.0f} s; {num_bytes / 1e9:.2f} GB", flush=True)
        group, sender, version = running.group, WeightSender(), 0
        engines = tuple(EngineAddress(c.url, c.num_ranks, c.start, c.number, c.keys, ()) for c in group.clients)
        for bucket_mib in args.bucket_mib:
            parts: list[tuple[float, float, float]] = []
            for _ in range(args.repeats + 1):
                version += 1
                target = WeightTarget("nccl" if args.device == "cuda" else "gloo", version, bucket_mib * MIB, engines)
                start_s = time.perf_counter()
                await group.pause("abort")
                paused_s = time.perf_counter()
                sent = await asyncio.to_thread(sender.send, weights.items(), target)
                sent_s = time.perf_counter()
                await group.resume()
                if not isinstance(sent, WeightManifest):
                    raise RuntimeError(sent.reason if isinstance(sent, Undelivered) else "nothing was sent")
                parts.append((paused_s - start_s, sent_s - paused_s, time.perf_counter() - sent_s))
            report(bucket_mib, num_bytes, parts[1:], args.link_gb_per_s)
        await asyncio.to_thread(sender.close)


def report(bucket_mib: int, num_bytes: int, parts: list[tuple[float, float, float]], link_gb_per_s: float | None) -> None:
    """Print medians; the first sync, which joins the group, is left out."""
    pause, send, resume = (statistics.median(values) for values in zip(*parts))
    total = statistics.median(map(sum, parts))
    rate = num_bytes / total / 1e9
    share = f", {rate / link_gb_per_s:.2f} of the link" if link_gb_per_s else ""
    print(
        f"buckets of {bucket_mib} MiB: {1e3 * total:.1f} ms (pause {1e3 * pause:.1f}, send {1e3 * send:.1f}, resume {1e3 * resume:.1f}), "
        f"{rate:.1f} GB/s{share}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True, help="interpreter with SGLang and sglang-router installed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", default=str(ASSETS / "model"))
    parser.add_argument("--engines", type=int, default=1, help="engines, one GPU each")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--lora-rank", type=int, help="sync an adapter of this rank instead of all weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--link-gb-per-s", type=float)
    parser.add_argument("--logs", type=Path, help="directory for logs (default: a temporary one)")
    args = parser.parse_args()
    args.files = sorted(Path(args.model).glob("*.safetensors"))
    args.gpu, args.sglang = 1, {"mem_fraction_static": 0.6, "disable_cuda_graph": True}
    if args.device == "cuda":
        args.sglang |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
    if args.lora_rank is not None:
        args.gpu = min(1, torch.cuda.device_count() - 1)
        args.sglang |= adapter_arguments([adapter_config(args)], Path(args.model), device=args.device)
    with tempfile.TemporaryDirectory(prefix="fuligo-bench-") if args.logs is None else contextlib.nullcontext(args.logs) as directory:
        args.logs = Path(directory)
        args.logs.mkdir(parents=True, exist_ok=True)
        asyncio.run(measure(args) if args.lora_rank is None else measure_adapter(args))


if __name__ == "__main__":
    main()
