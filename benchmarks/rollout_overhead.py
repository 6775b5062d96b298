"""Tokens per second of rollouts through the whole stack, compared with the same requests sent directly by SGLang's own benchmark client.

    python benchmarks/rollout_overhead.py --engine-python .venv-sglang/bin/python [--requests 256] [--prompt-tokens 64] [--tokens 64]
    python benchmarks/rollout_overhead.py --engine-python /envs/sglang/bin/python --device cuda --model Qwen/Qwen3-0.6B --tokens 512 \
        --sglang '{"attention_backend": "triton", "mem_fraction_static": 0.8}'

With one engine and one router, these alternate `--repeats` times:

- bench_serving: `python -m sglang.bench_serving`, token ids as input, no streaming, with log-probabilities, sent to the engine;
- stack: the runner (checks, text, rewards) through sglang-router to the same engine;
- no router: the runner to the engine, to attribute a difference.

Prompts are consecutive token ids from a random first one, as in bench_serving (`random-ids`). The engine's cache is flushed before every
measurement. The best result of each counts.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from rollout_waves import fleet, variables
from synthetic_rollout import ASSETS, build_runner, check_complete
from transformers import AutoTokenizer

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.types import IntArray

Turn = Callable[[int], Awaitable[float]]
"""Function that takes the number of the measurement and returns tokens per second."""


def prompts(args: argparse.Namespace, vocab_size: int, turn: int) -> list[IntArray]:
    first = np.random.default_rng(turn).integers(0, vocab_size, args.requests)
    return list(((first + np.arange(args.requests))[:, None] + np.arange(args.prompt_tokens)).astype(np.int32) % vocab_size)


def through(engines: EngineGroup, args: argparse.Namespace) -> Turn:
    """Return a measurement of the runner, whose requests go through the router if the group has one."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    async def turn(number: int) -> float:
        ids = prompts(args, tokenizer.vocab_size, number)
        runner = build_runner(engines, tokenizer, ids, samples_per_prompt=1, num_tokens=args.tokens)
        start_s = time.perf_counter()
        rollout = await runner.rollout(number)
        seconds = time.perf_counter() - start_s
        check_complete(rollout, num_requests=args.requests, num_tokens=args.tokens)
        return args.requests * args.tokens / seconds

    return turn


def bench_serving(engine: InferenceEngine, args: argparse.Namespace) -> Turn:
    """Return a measurement of SGLang's client, which takes the engine's key from OPENAI_API_KEY."""
    environment = os.environ | variables(args) | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": engine.keys.requests}

    async def turn(number: int) -> float:
        result = args.logs / f"bench-{number}.jsonl"
        flags = f"--backend sglang --base-url {engine.url} --model {args.model} --tokenizer {args.model} --dataset-name random-ids"
        flags += f" --tokenize-prompt --num-prompts {args.requests} --random-input-len {args.prompt_tokens}"
        flags += f" --random-output-len {args.tokens} --random-range-ratio 1 --temperature 1 --return-logprob --logprob-start-len -1"
        flags += f" --disable-stream --disable-tqdm --warmup-requests 0 --seed {number} --output-file {result}"
        command = [args.engine_python, "-m", "sglang.bench_serving", *flags.split()]
        with (args.logs / "bench.txt").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        if await process.wait():
            raise RuntimeError((args.logs / "bench.txt").read_text(errors="replace")[-3000:])
        answer = json.loads(result.read_text().splitlines()[-1])
        if answer["completed"] != args.requests or answer["total_output_tokens"] != args.requests * args.tokens:
            raise RuntimeError(f"bench_serving completed {answer['completed']} requests, {answer['total_output_tokens']} tokens")
        return answer["output_throughput"]

    return turn


async def measure(args: argparse.Namespace) -> None:
    async with fleet(args, tp=args.tp) as running:
        engine = running.group.clients[0]
        turns: dict[str, Turn] = {
            "bench_serving": bench_serving(engine, args),
            "stack": through(running.group, args),
            "no router": through(EngineGroup([engine]), args),
        }
        best = dict.fromkeys(turns, 0.0)
        for number in range(args.repeats + 1):
            for name, turn in turns.items():
                await engine.flush_cache()
                rate = await turn(number)
                if number:  # The first measurement is the warm-up.
                    best[name] = max(best[name], rate)
                print(f"{'warm-up' if number == 0 else number}: {name} {rate:,.0f} tok/s", flush=True)
        print(
            f"{args.requests} requests, {args.prompt_tokens} + {args.tokens} tokens: "
            + ", ".join(f"{n} {r:,.0f} tok/s" for n, r in best.items())
        )
        direct = best["bench_serving"]
        print(f"stack / bench_serving = {best['stack'] / direct:.3f}, no router / bench_serving = {best['no router'] / direct:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True, help="interpreter with SGLang and sglang-router installed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tp", type=int, default=1, help="GPUs (or processes) of the engine")
    parser.add_argument("--model", default=str(ASSETS / "model"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--sglang", type=json.loads, default={}, help="additional arguments of SGLang's server, as JSON, names with underscores"
    )
    args = parser.parse_args()
    args.engines, args.gpu = 1, 0
    args.sglang = {"max_running_requests": args.requests, **args.sglang}
    with tempfile.TemporaryDirectory(prefix="fuligo-bench-") as directory:
        args.logs = Path(directory)
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
