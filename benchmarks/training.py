"""Speed and memory of the trainers on the GPUs of one machine: tokens/s, FLOP/s, peak memory compared with the plan, weight export.

    python benchmarks/training.py                       # all cases that fit this machine's GPUs
    python benchmarks/training.py dense moe-ep2         # these cases
    python benchmarks/training.py --model-only small    # write its checkpoint with the quickstart's tokenizer

A case is a model of a published shape with random weights and as many layers as fit, trained by the rank workers of `fuligo train`: packed
rows of mixed lengths, forward, backward, optimizer step. FLOPs are three forward passes of the model, without recomputation, with half of
the causal attention and the head for response tokens only. The share refers to 790 TFLOP/s, the rate of an 8192 x 8192 x 8192 bf16 matrix
product on an H200. Peak memory is the maximum that PyTorch reserved plus what the process holds in addition; the plan assumes that all rows
are as long as the longest.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from training_cases import CASES, MODELS, Case
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.formats.hugging_face import read_config_json
from fuligo.job.trainer_settings import trainer_settings
from fuligo.layout.flops import forward_flops
from fuligo.models.names import ModelNames
from fuligo.models.registry import architecture_of, names_of
from fuligo.planner.make_plan import make_plan
from fuligo.trainer.shares import StepShare
from fuligo.trainer.torch_backend.tensor_files import write_tensors
from fuligo.types import TrainBatch, TrainSample

PLAIN_PRODUCT_FLOPS = 790e12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS_DIRECTORY = Path(
    os.environ.get(
        "FULIGO_BENCHMARK_MODELS", "/dev/shm/fuligo-models" if Path("/dev/shm").is_dir() else f"{tempfile.gettempdir()}/fuligo-models"
    )
)
"""Directory for one checkpoint at a time, because it may be in memory; other files in it are not touched."""
TOKENIZER = Path(str(files("fuligo.quickstart"))) / "assets" / "model"
GIB = 2**30
NUM_RANDOM = 2**24 + 43
"""Number of random values that all weights are copied from, because drawing billions is slow; prime, so that no two tensors are equal."""
DISTRIBUTED_TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases of {', '.join(CASES)} (default: all that fit this machine)")
    parser.add_argument("--steps", type=int, default=4, help="timed optimizer steps, after two warm-ups")
    parser.add_argument("--flag", action="append", default=[], metavar="WORD", help="further word to append to every case's command line")
    parser.add_argument("--model-only", action="store_true", help="write the checkpoint of the case and print its directory")
    parser.add_argument("--no-export", action="store_true", help="skip the export of weights")
    parser.add_argument("--no-offload", action="store_true", help="skip offload and onload, the first of which pins host memory")
    parser.add_argument("--profile", action="store_true", help="profile one further step of rank 0 by kernels, to stderr")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of that step as JSON for Perfetto (.gz: compressed)")
    parser.add_argument("--port", type=int, default=29544, help="first of two ports for the rendezvous of the ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure_rank(options.cases[0], options)
        return
    num_gpus = torch.cuda.device_count()
    names = options.cases or [name for name, case in CASES.items() if case.num_gpus <= num_gpus and case.model != "tiny"]
    print(f"torch {torch.__version__}, {num_gpus} x {torch.cuda.get_device_name() if num_gpus else 'no GPU'}", flush=True)
    for name in names:
        if options.model_only:
            print(save_model(CASES[name]))
        else:
            run_case(name, options)


def run_case(name: str, options: argparse.Namespace) -> None:
    """Run a case in its own processes, so that the next one starts with free memory."""
    case = CASES[name]
    save_model(case)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(case.num_gpus), "--master_port", str(options.port)]
    words = [word for flag in options.flag for word in (f"--flag={flag}",)]
    switches = {"--no-export": options.no_export, "--no-offload": options.no_offload, "--profile": options.profile}
    extra = [option for option, is_on in switches.items() if is_on]
    extra += ["--trace", options.trace] if options.trace else []
    settings = trainer_settings(case_config(case, options.flag), DEVICE, initial_weights=model_directory(case), num_rollout=10)
    environment = {"OMP_NUM_THREADS": "4", **settings.environment, **os.environ}
    arguments = ["--rank", name, "--steps", str(options.steps), "--port", str(options.port), *words, *extra]
    done = subprocess.run([*command, __file__, *arguments], env=environment, check=False)
    if done.returncode:
        print(json.dumps({"case": name, "failed": done.returncode}), flush=True)


def save_model(case: Case) -> Path:
    """Write a checkpoint of pseudo-random bf16 weights once, and return its directory."""
    directory = model_directory(case)
    if (directory / "config.json").exists():
        return directory
    for earlier in (directory for name in MODELS for directory in MODELS_DIRECTORY.glob(f"{name}-[0-9]*")):
        shutil.rmtree(earlier)
    config = AutoConfig.for_model(**config_values(case), dtype="bfloat16")
    noise = (torch.randn(NUM_RANDOM) * config.initializer_range).bfloat16()
    started = time.perf_counter()
    write_tensors(directory, random_weights(names_of(config.to_dict()), noise))
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(directory)  # Written last, because it marks the checkpoint as complete.
    print(f"wrote {directory} in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return directory


def random_weights(names: ModelNames, noise: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the checkpoint: vectors of ones, and matrices cut from the same noise at different offsets."""
    largest, start = max(math.prod(weight.shape) for weight in names.weights()), 0
    endless = noise.repeat(1 + -(-largest // len(noise)))
    for weight in names.weights():
        for name, shape in zip(weight.checkpoint, names.checkpoint_shapes(weight), strict=True):
            size = math.prod(shape)
            values = endless[start : start + size].clone() if len(shape) > 1 else noise.new_ones(size)
            yield name, values.view(shape)
            start = (start + size) % len(noise)


def model_directory(case: Case) -> Path:
    return MODELS_DIRECTORY / f"{case.model}-{config_values(case)['num_hidden_layers']}"


def config_values(case: Case) -> dict[str, Any]:
    values = {"max_position_embeddings": 40960, "rope_theta": 1_000_000.0, "initializer_range": 0.02, **MODELS[case.model]}
    if case.num_layers is not None:
        values["num_hidden_layers"] = case.num_layers
        if "mlp_layer_types" in values or case.model == "glm-4.7-flash":
            values["mlp_layer_types"] = ["dense"] + ["sparse"] * (case.num_layers - 1)
    return values


def case_config(case: Case, extra: list[str]) -> Config:
    directory = str(model_directory(case))
    return parse(
        [
            "--train-backend", case.backend, "--hf-checkpoint", directory, "--prompt-data", "unused.jsonl", "--rm-type", "random",
            "--actor-num-gpus-per-node", str(case.num_gpus), "--rollout-num-gpus", str(case.num_gpus), "--launcher", "local",
            "--use-dynamic-batch-size", "--max-tokens-per-gpu", str(case.max_tokens), "--device", DEVICE,
            "--num-rollout", "10", "--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "4096",
            "--rollout-max-prompt-len", "512", *(["--accumulate-allreduce-grads-in-fp32"] if case.backend == "megatron" else []),
            *case.flags, *extra,
        ]
    ).config  # fmt: skip


def rollout(case: Case, num_rows: int, context_parallel: int, vocab_size: int) -> TrainBatch:
    """Build the batch of one optimizer step: `num_rows` full rows of samples, whose first eighth is the prompt."""
    rng = np.random.default_rng(0)
    samples: list[TrainSample] = []
    for _ in range(num_rows):
        left = case.max_tokens * context_parallel - 8
        while left >= 256:
            length = case.sample_tokens or min(left, int(np.clip(256 + rng.exponential(1500), 256, 4096)))
            if case.sample_tokens is None and left - length < 256 and left <= 4351:
                length = left
            samples.append(random_sample(len(samples), length, vocab_size, rng))
            left -= length
    return TrainBatch(samples, [list(range(len(samples)))], [len(samples)])


def random_sample(index: int, length: int, vocab_size: int, rng: np.random.Generator) -> TrainSample:
    response = length - length // 8
    return TrainSample(
        index=index,
        group_index=index // 8,
        tokens=rng.integers(3, vocab_size, length).astype(np.int32),
        prompt_length=length - response,
        loss_mask=np.ones(response, np.int8),
        reward=1.0,
        engine_logprobs=np.full(response, -11.9, np.float32),
        versions=np.zeros(response, np.int32),
        mask_sum=float(response),
        advantages=rng.standard_normal(response).astype(np.float32),
    )


def measure_rank(name: str, options: argparse.Namespace) -> None:
    from fuligo.trainer.ranks.rank import build_worker
    from fuligo.trainer.ranks.world import join_world
    from fuligo.trainer.shares import step_shares

    case = CASES[name]
    if case.backend == "megatron":
        from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], options.port + 1, world_size=size, is_master=rank == 0, timeout=timedelta(seconds=DISTRIBUTED_TIMEOUT_S)
    )
    world = join_world(rank, size, DEVICE, store=store, key=None, timeout_s=DISTRIBUTED_TIMEOUT_S)
    config = case_config(case, options.flag)
    settings = trainer_settings(config, DEVICE, initial_weights=model_directory(case), num_rollout=10)
    load_s, worker = timed(lambda: build_worker(settings, world))
    weights_s = timed(lambda: load_hugging_face(worker.chunks, model_directory(case)))[0] if case.backend == "megatron" else 0.0
    architecture = architecture_of(read_config_json(model_directory(case) / "config.json"))
    cp, parallel = config.parallel.context_parallel_size, config.parallel
    dp = size // (cp * parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    batch = rollout(case, case.num_rows * dp, cp, architecture.vocab_size)
    steps = step_shares(batch, settings, worker.balance_by)[settings.replica_of(rank)]
    longest_row = int(gathered(torch.tensor([max(-(-num // cp) for num in row_tokens(steps))], device=DEVICE)).max())
    for _ in range(2):
        worker.train(steps)
    times = [timed(lambda: worker.train(steps))[0] for _ in range(options.steps)]
    step_s = min(times)
    num_tokens = sum(len(sample.tokens) for sample in batch.samples)
    flops = forward_flops(architecture)
    step_flops = 3 * sum(flops.sequence(len(s.tokens), len(s.tokens) ** 2, s.response_length) for s in batch.samples)
    peaks = gathered(torch.tensor(peak_memory(), device=DEVICE))
    tflops = step_flops / step_s / size / 1e12
    result: dict[str, Any] = {
        "case": name,
        "parameters_b": round(architecture.num_parameters / 1e9, 2),
        "gpus": size,
        "step_s": [round(seconds, 3) for seconds in times],
        "tokens_per_s": round(num_tokens / step_s),
        "tflops_per_gpu": round(tflops, 1),
        "share_of_790": round(tflops * 1e12 / PLAIN_PRODUCT_FLOPS, 3),
        "load_s": [round(load_s, 1), round(weights_s, 1)],
        "peak_gib": [round(peak / GIB, 2) for peak in peaks[:, 0].tolist()],
        "allocated_gib": [round(peak / GIB, 2) for peak in peaks[:, 1].tolist()],
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"] if DEVICE == "cuda" else 0,
        "longest_row": longest_row,
        "planned_gib": planned(case_config(case, [*options.flag, "--max-tokens-per-gpu", str(longest_row)]), name) if rank == 0 else [],
    }
    if options.profile:
        profile_step(lambda: worker.train(steps), prints=rank == 0, trace=options.trace)
    if not options.no_export:
        result |= measure_export(worker)
    if not options.no_offload:
        moves = [(timed(worker.offload)[0], timed(worker.onload)[0]) for _ in range(2)]
        result |= {f"{name}_s": [round(seconds, 2) for seconds in times] for name, times in zip(("offload", "onload"), zip(*moves))}
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def row_tokens(steps: list[StepShare]) -> list[int]:
    """Return the number of tokens of each row of this replica; rows are about equally long, and all below the limit."""
    return [sum(len(step.samples.samples[i].tokens) for i in plan.samples) for step in steps for plan in step.schedule.plans]


def profile_step(step: Callable[[], Any], *, prints: bool, trace: str | None) -> None:
    """Print the kernel times of one step; NCCL at the top means that ranks wait for each other or for the link."""
    if not prints:
        step()
        return
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]) as profiler:
        timed(step)
    order = "self_cuda_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=50, max_name_column_width=70), file=sys.stderr, flush=True)
    if trace:
        profiler.export_chrome_trace(trace)


def peak_memory() -> list[int]:
    """Return the peak bytes of GPU memory of the process, and of the tensors in it."""
    if DEVICE == "cpu":
        return [0, 0]
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return [torch.cuda.max_memory_reserved() + beside, torch.cuda.max_memory_allocated()]


def measure_export(worker: Any) -> dict[str, Any]:
    """Gather every tensor under its Hugging Face name on every rank, as a weight sync does."""
    num_bytes = 0

    def drain() -> None:
        nonlocal num_bytes
        num_bytes = sum(tensor.nbytes for _, tensor in worker.named_weights())

    timed(drain)
    before = 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds, _ = timed(drain)
    extra = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
    return {
        "export_gb": round(num_bytes / 1e9, 2),
        "export_gb_per_s": round(num_bytes / 1e9 / seconds, 1),
        "export_extra_gib": round(extra / GIB, 2),
    }


def planned(config: Config, name: str) -> list[float]:
    """Return the planned memory of the trainer per stage, in GiB."""
    plan = make_plan(config, "h200-141", name)
    return [round(bar.used_bytes / GIB, 2) for bar in plan.memory if bar.pipeline_rank is not None]


def gathered(values: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    value = work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, value


if __name__ == "__main__":
    main()
