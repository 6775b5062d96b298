"""Tokens per second of the embedded engine over HTTP, compared with transformers' `generate` and, if given, SGLang on a CPU.

    python benchmarks/engine.py [--requests 1 16 256] [--threads N] [--repeats 3] [--engine-python .venv-sglang/bin/python]

All use the same model (a Qwen3 of 0.85M parameters), prompts and numbers of new tokens, with log-probabilities, in one run. The engines are
measured alternately, `--repeats` times, and the best result of each counts, so that other work on the machine affects all of them equally.

- equal lengths: 32 new tokens per request; `generate` runs them as one batch.
- mixed lengths: 8 to 256 new tokens with a long tail; `generate` runs one batch to the longest response; only requested tokens count.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fuligo.config.secret import Environment
from fuligo.engines.client import EngineClient
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, launch_embedded
from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import ServerPorts, ServerSettings, SGLangServer

Runner = Callable[["Workload"], Awaitable[None]]
VOCAB_SIZE = 512
PROMPT_TOKENS = 16
EQUAL_TOKENS = 32
TORCHVISION_STUB = Path(__file__).parents[1] / "tests" / "sglang" / "stubs"
"""Stub of torchvision, which SGLang imports; the published one does not load with a CPU build of torch."""


@dataclass(slots=True)
class Workload:
    name: str
    prompts: list[list[int]]
    lengths: list[int]
    """Number of new tokens of each request."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def workload(kind: str, num_requests: int) -> Workload:
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, VOCAB_SIZE, (num_requests, PROMPT_TOKENS)).tolist()
    if kind == "equal":
        return Workload("equal", prompts, [EQUAL_TOKENS] * num_requests)
    lengths = np.clip(8 + rng.exponential(32, num_requests), 8, 256).astype(int)
    lengths[0] = 256
    return Workload("mixed", prompts, lengths.tolist())


def save_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


async def run_engine(client: EngineClient, load: Workload) -> None:
    async def one(number: int) -> None:
        params = SamplingParams(load.lengths[number], ignore_eos=True)
        answer = await client.generate(load.prompts[number], params, rid=f"{time.monotonic_ns()}-{number}")
        assert len(answer.output_ids) == load.lengths[number]

    await asyncio.gather(*(one(number) for number in range(len(load.prompts))))


def run_generate(model: Any, load: Workload) -> None:
    """Generate the workload as one batch, with log-probabilities from the scores that `generate` keeps."""
    longest = max(load.lengths)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(load.prompts),
            attention_mask=torch.ones(len(load.prompts), PROMPT_TOKENS, dtype=torch.long),
            do_sample=True,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)


async def best_seconds(runners: dict[str, Runner], load: Workload, repeats: int) -> dict[str, float]:
    best = dict.fromkeys(runners, float("inf"))
    for _ in range(repeats):
        for name, run in runners.items():
            start = time.perf_counter()
            await run(load)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def row(load: Workload, seconds: dict[str, float]) -> str:
    rates = {name: load.num_tokens / s for name, s in seconds.items()}
    ratios = [f"{rates['embedded'] / rate:.2f} x {name}" for name, rate in rates.items() if name != "embedded"]
    cells = [f"{name} {rate:>8,.0f} tok/s" for name, rate in rates.items()]
    return (
        f"{load.name:<6} {len(load.prompts):>4} requests {load.num_tokens:>6} tokens   {'   '.join(cells)}   embedded = {', '.join(ratios)}"
    )


async def measure(args: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(args.threads)
    model = Qwen3ForCausalLM.from_pretrained(directory)

    async def generate(load: Workload) -> None:
        await asyncio.to_thread(run_generate, model, load)

    async with AsyncExitStack() as stack:
        embedded = await stack.enter_async_context(embedded_engine(directory, args.threads))
        runners: dict[str, Runner] = {"embedded": lambda load: run_engine(embedded, load), "generate": generate}
        if args.engine_python is not None:
            sglang = await stack.enter_async_context(sglang_engine(directory, args))
            runners["SGLang"] = lambda load: run_engine(sglang, load)
        for kind in ("equal", "mixed"):
            for num_requests in args.requests:
                load = workload(kind, num_requests)
                print(row(load, await best_seconds(runners, load, args.repeats)), flush=True)


@asynccontextmanager
async def embedded_engine(directory: Path, threads: int) -> AsyncIterator[EngineClient]:
    engine = await launch_embedded(EmbeddedEngineSettings(str(directory), directory / "engine.log", device="cpu", num_threads=threads))
    client = EngineClient(engine.url, engine.keys)
    try:
        yield client
    finally:
        await client.close()
        await engine.stop()


@asynccontextmanager
async def sglang_engine(directory: Path, args: argparse.Namespace) -> AsyncIterator[EngineClient]:
    with PortClaims() as claims:
        settings = ServerSettings(
            name="SGLang",
            model_path=str(directory),
            tp_size=1,
            pp_size=1,
            arguments={
                "skip_tokenizer_init": True,
                "max_running_requests": 256,
                "max_total_tokens": 131072,
                "dtype": args.sglang_dtype,
            },
            worker_type="regular",
            device="cpu",
            host="127.0.0.1",
            ports=ServerPorts.claim(claims),
            log_file=directory / "sglang.log",
            python=args.engine_python,
            environment=Environment({"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(TORCHVISION_STUB)}),
        )
        server = SGLangServer(settings)
        client = EngineClient(server.url, server.settings.keys)
        try:
            await server.wait_ready()
            yield client
        finally:
            await client.close()
            await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-python", help="interpreter that has SGLang (make install-sglang: .venv-sglang/bin/python)")
    parser.add_argument("--sglang-dtype", default="bfloat16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuligo-bench-") as directory:
        save_model(Path(directory))
        asyncio.run(measure(args, Path(directory)))


if __name__ == "__main__":
    main()
