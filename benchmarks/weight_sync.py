"""Time of a weight sync by broadcast to real SGLang engines, by bucket size: GB/s and share of the link.

    python benchmarks/weight_sync.py --engine-python python3 --model MODEL --engines 3        # GPU 0 sends, GPUs 1 to 3 receive
    python benchmarks/weight_sync.py --engine-python .venv-sglang/bin/python --device cpu     # the quickstart's model, by gloo
    python benchmarks/weight_sync.py --engine-python python3 --model MODEL --lora-rank 16     # an adapter of all linear layers, on GPU 0

The sender is the trainer's (`fuligo/weights/senders.py`) with the checkpoint's tensors on its device, so gathering costs nothing. Engines
pause and resume as in a run. They receive all buckets by one call, then, for comparison, by a call per bucket. `--link-gb-per-s` is the
bandwidth that `benchmarks/link.py` reports for as many GPUs.

With `--lora-rank`, a LoRA adapter of random values replaces the previous one in the engines (`fuligo/weights/adapter.py`). The trainer's
copy is float32 on GPU 0; the first engine is on GPU 1, or on GPU 0 if there is no other. The time of a load is printed by its parts: the
payload in shared memory, and each call of an engine. With `--trainer`, the torch trainer's worker then sends its adapter as in a run: it
gathers and copies the tensors, and makes the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rollout_waves import fleet
from safetensors.torch import load_file
from synthetic_rollout import ASSETS
from torch.distributed import HashStore

from fuligo.engines.client import EngineClient
from fuligo.engines.group import EngineGroup
from fuligo.engines.sglang.backend import adapter_arguments
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.payload import NamedTensors, SharedCopies
from fuligo.formats.weight_manifest import EngineAddress, Undelivered, WeightManifest, WeightTarget, weights_checksum
from fuligo.models.adapter import adapter_tensors, empty_adapted_model
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World, join_world
from fuligo.trainer.torch_backend.lora import named_adapter_weights
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.weights.adapter import send_adapter
from fuligo.weights.senders import WeightSender

MIB = 2**20
PAUSE_CALLS = ("/pause_generation", "/continue_generation")


async def measure_adapter(args: argparse.Namespace) -> None:
    """Print the times of adapter syncs and of their parts."""
    device, config = "cuda:0" if args.device == "cuda" else "cpu", adapter_config(args)
    shapes = {name: parameter.shape for name, parameter in adapter_tensors(empty_adapted_model(config, Path(args.model))).items()}
    trained = {name: 0.01 * torch.randn(shape, device=device) for name, shape in shapes.items()}
    num_bytes = sum(2 * tensor.numel() for tensor in trained.values())
    worker = trainer_worker(args, config) if args.trainer else None
    async with AsyncExitStack() as stack:
        running, took = await stack.enter_async_context(fleet(args)), stack.enter_context(timed_calls())
        print(f"{args.engines} engines ready; adapter of rank {config.rank}: {len(trained)} tensors, {num_bytes / 1e6:.1f} MB", flush=True)
        group, times, copies = running.group, [], SharedCopies()
        tensors: NamedTensors = []
        took.clear()  # discards the calls of the start
        engines = tuple(EngineAddress(c.url, c.num_ranks, c.start, c.number, c.keys, ()) for c in group.clients)
        for version in range(1, args.repeats + 2):
            start_s = time.perf_counter()
            await group.pause("abort")
            paused_s = time.perf_counter()
            tensors = [(name, tensor.bfloat16()) for name, tensor in trained.items()]
            sent = await asyncio.to_thread(send_adapter, tensors, config, WeightTarget("tensor", version, MIB, engines), copies)
            sent_s = time.perf_counter()
            await group.resume()
            if not isinstance(sent, WeightManifest):
                raise RuntimeError(sent.reason)
            end_s = time.perf_counter()
            calls = {path: seconds for path, seconds in took.items() if path not in PAUSE_CALLS}
            # Negative where the tensors are written while the engines unload the previous adapter.
            rest_s = sent_s - paused_s - sum(calls.values())
            times.append({"pause": paused_s - start_s, **calls, "rest": rest_s, "resume": end_s - sent_s})
            print(f"sync {version}: {shown(times[-1:])}", flush=True)
            took.clear()
        print(f"first: {shown(times[:1])}\nlater, median: {shown(times[1:])}; alone: {shown(parts_alone(tensors, copies))}", flush=True)
        if worker is not None:
            target = WeightTarget("tensor", args.repeats + 2, MIB, engines)
            await measure_trainer(args, worker, group, target)


def trainer_worker(args: argparse.Namespace, config: AdapterConfig) -> TorchRankWorker:
    """Return the torch trainer's only rank, whose adapter has random values."""
    model, is_cuda = Path(args.model), args.device == "cuda"
    settings = TorchTrainerSettings(
        hf_checkpoint=model,
        initial_weights=model,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-5)),
        lora=LoraSettings(config, is_named=True),
        device="cuda" if is_cuda else "cpu",
        precision="bf16" if is_cuda else "fp32",
    )
    world = join_world(0, 1, "cuda", store=HashStore(), key=None, timeout_s=60) if is_cuda else World()
    worker = TorchRankWorker(settings, world)
    with torch.no_grad():
        for parameter in adapter_tensors(worker.policy.model).values():
            parameter.normal_(std=0.01)
    return worker


async def measure_trainer(args: argparse.Namespace, worker: TorchRankWorker, group: EngineGroup, target: WeightTarget) -> None:
    """Print the times in which the trainer syncs its adapter, and of gathering alone."""
    times = []
    for number in range(args.repeats + 1):
        gather_s = time.perf_counter()
        gathered = [tensor for _, tensor in named_adapter_weights(worker.policy.model, dtype=torch.bfloat16)]
        gathered[-1].sum().item()  # waits for the device
        start_s = time.perf_counter()
        await group.pause("abort")
        paused_s = time.perf_counter()
        sent = await asyncio.to_thread(worker.send_weights, replace(target, version=target.version + number))
        sent_s = time.perf_counter()
        await group.resume()
        if not isinstance(sent, WeightManifest):
            raise RuntimeError(sent.reason if isinstance(sent, Undelivered) else "nothing was sent")
        times.append({"pause": paused_s - start_s, "send": sent_s - paused_s, "resume": time.perf_counter() - sent_s})
        print(f"trainer, sync {number + 1}: {shown(times[-1:])}, gathering alone {1e3 * (start_s - gather_s):.1f} ms", flush=True)
    print(f"trainer, later, median: {shown(times[1:])}", flush=True)


def shown(times: Sequence[Mapping[str, float]]) -> str:
    """Format the medians of the parts of syncs in milliseconds, and their sum."""
    medians = {name: 1e3 * statistics.median(parts.get(name, 0.0) for parts in times) for name in times[-1]}
    return f"{sum(medians.values()):.1f} ms (" + ", ".join(f"{name} {ms:.1f}" for name, ms in medians.items()) + ")"


def parts_alone(tensors: NamedTensors, copies: SharedCopies) -> list[dict[str, float]]:
    """Return the seconds of writing the payload and of computing the digest, each measured three times."""
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        written, _ = copies.write(tensors)
        written_s = time.perf_counter()
        weights_checksum(written)
        times.append({"write": written_s - start_s, "digest": time.perf_counter() - written_s})
    return times


@contextmanager
def timed_calls() -> Iterator[dict[str, float]]:
    """Time the engines' control calls inside the block. Yield the seconds by path, of the longest call since the caller cleared them."""
    took: dict[str, float] = {}
    call = EngineClient._call

    async def timed(client: EngineClient, path: str, *arguments: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return await call(client, path, *arguments, **options)
        finally:
            took[path] = max(took.get(path, 0.0), time.perf_counter() - start_s)

    EngineClient._call = timed
    try:
        yield took
    finally:
        EngineClient._call = call


def adapter_config(args: argparse.Namespace) -> AdapterConfig:
    return AdapterConfig(rank=args.lora_rank, alpha=32.0)


async def measure(args: argparse.Namespace) -> None:
    device = "cuda:0" if args.device == "cuda" else "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(0)
        os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang and the trainer set it
    weights = {name: tensor.to(device) for file in args.files for name, tensor in load_file(file).items()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    started_s = time.perf_counter()
    async with fleet(args) as running:
        print(f"{args.engines} engines ready after {time.perf_counter() - started_s:.0f} s; {num_bytes / 1e9:.2f} GB", flush=True)
        group, sender, version = running.group, WeightSender(), 0
        engines = tuple(EngineAddress(c.url, c.num_ranks, c.start, c.number, c.keys, ()) for c in group.clients)
        for bucket_mib, streams in [(size, streams) for streams in (True, False) for size in args.bucket_mib]:
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
                assert sender._group is not None
                sender._group.streams = streams
                parts.append((paused_s - start_s, sent_s - paused_s, time.perf_counter() - sent_s))
            report(f"{'one call' if streams else 'a call per bucket'}, {bucket_mib} MiB", num_bytes, parts[1:], args.link_gb_per_s)
        await asyncio.to_thread(sender.close)


def report(how: str, num_bytes: int, parts: list[tuple[float, float, float]], link_gb_per_s: float | None) -> None:
    """Print medians without the first sync, which joins the process group."""
    pause, send, resume = (statistics.median(values) for values in zip(*parts))
    total = statistics.median(map(sum, parts))
    rate = num_bytes / total / 1e9
    share = f", {rate / link_gb_per_s:.2f} of the link" if link_gb_per_s else ""
    print(
        f"{how}: {1e3 * total:.1f} ms (pause {1e3 * pause:.1f}, send {1e3 * send:.1f}, resume {1e3 * resume:.1f}), {rate:.1f} GB/s{share}",
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
    parser.add_argument("--trainer", action="store_true", help="with --lora-rank: also sync from the torch trainer's worker, on GPU 0")
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
