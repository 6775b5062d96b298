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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from synthetic_rollout import ASSETS, TIMEOUT_S, build_runner, check_complete
from transformers import AutoTokenizer

from fuligo.config.secret import Environment
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import ServerPorts, ServerSettings
from fuligo.types import IntArray

TORCHVISION_STUB = Path(__file__).parents[1] / "tests" / "sglang" / "stubs"
"""Stub of torchvision, which SGLang imports; the published one does not load with a CPU build of torch."""
HOST = "127.0.0.1"
Turn = Callable[[int], Awaitable[float]]
"""Function that takes the number of the measurement and returns tokens per second."""


@asynccontextmanager
async def fleet(args: argparse.Namespace, directory: Path) -> AsyncIterator[Fleet]:
    environment = Environment({"PYTHONPATH": str(TORCHVISION_STUB)} if args.device == "cpu" else {})
    with PortClaims() as claims:
        server = ServerSettings(
            name="engine 0",
            model_path=args.model,
            tp_size=args.tp,
            pp_size=1,
            arguments={"max_running_requests": args.requests, **args.sglang},
            worker_type="regular",
            device=args.device,
            host=HOST,
            ports=ServerPorts.claim(claims),
            log_file=directory / "engine.txt",
            gpu_ids=tuple(range(args.tp)) if args.device == "cuda" else (),
            python=args.engine_python,
            environment=environment,
        )
        router = RouterSettings(
            directory / "router.txt", HOST, claims.claim(), claims.claim(), python=args.engine_python, environment=environment
        )
        settings = FleetSettings(
            (server,),
            router,
            restart=False,
            health_interval_s=60.0,
            health_timeout_s=60.0,
            request_retries=0,
            request_timeout_s=TIMEOUT_S,
        )
        running = await Fleet.launch(settings)
        try:
            yield running
        finally:
            await running.stop()


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


def bench_serving(url: str, args: argparse.Namespace, directory: Path) -> Turn:
    environment = os.environ | ({"PYTHONPATH": str(TORCHVISION_STUB)} if args.device == "cpu" else {}) | {"HF_HUB_OFFLINE": "1"}

    async def turn(number: int) -> float:
        result = directory / f"bench-{number}.jsonl"
        flags = (
            f"--backend sglang --base-url {url} --model {args.model} --tokenizer {args.model} --dataset-name random-ids --tokenize-prompt"
        )
        flags += f" --num-prompts {args.requests} --random-input-len {args.prompt_tokens} --random-output-len {args.tokens}"
        flags += " --random-range-ratio 1 --temperature 1 --return-logprob --logprob-start-len -1 --disable-stream --disable-tqdm"
        flags += f" --warmup-requests 0 --seed {number} --output-file {result}"
        command = [args.engine_python, "-m", "sglang.bench_serving", *flags.split()]
        with (directory / "bench.txt").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        if await process.wait():
            raise RuntimeError((directory / "bench.txt").read_text(errors="replace")[-3000:])
        answer = json.loads(result.read_text().splitlines()[-1])
        if answer["completed"] != args.requests or answer["total_output_tokens"] != args.requests * args.tokens:
            raise RuntimeError(f"bench_serving completed {answer['completed']} requests, {answer['total_output_tokens']} tokens")
        return answer["output_throughput"]

    return turn


async def measure(args: argparse.Namespace, directory: Path) -> None:
    async with fleet(args, directory) as running:
        engine = running.group.clients[0]
        turns: dict[str, Turn] = {
            "bench_serving": bench_serving(engine.url, args, directory),
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
    with tempfile.TemporaryDirectory(prefix="fuligo-bench-") as directory:
        asyncio.run(measure(args, Path(directory)))


if __name__ == "__main__":
    main()
