"""What the rollout runner itself costs: thousands of requests at a time against a server that answers from a script.

    python benchmarks/runner.py [--requests 10000] [--prompt-tokens 512] [--tokens 256] [--rollouts 5]

A rollout of --requests samples, eight to a prompt, all in flight at once: runner, sampler, HTTP client, checks, decoding to text, a
reward that costs nothing. The server, a process of its own, answers each request --delay seconds after the last one could have come in,
always with the same tokens and log-probabilities. For every rollout: CPU seconds of this process per thousand requests, its memory, and
how many requests were in the server at once. What it costs on each further rollout shows whether anything piles up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web
from synthetic_rollout import ASSETS, TIMEOUT_S, build_runner, check_complete
from transformers import AutoTokenizer

from fuligo.engines.client import EngineGroup

SAMPLES_PER_PROMPT = 8
FIRST_TOKEN, NUM_TOKEN_IDS = 10, 20


class ScriptedServer:
    """Answers `/generate` with the same body, some time after the request that is the last of its rollout."""

    def __init__(self, num_tokens: int, num_requests: int, delay_s: float) -> None:
        ids = [FIRST_TOKEN + number % NUM_TOKEN_IDS for number in range(num_tokens)]
        meta = {
            "id": "scripted",
            "finish_reason": {"type": "length", "length": num_tokens},
            "prompt_tokens": 1,
            "completion_tokens": num_tokens,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [[-1.0 - token / 97, token, None] for token in ids],
        }
        self._answer = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        self._num_requests = num_requests
        self._delay_s = delay_s
        self._num_waiting = 0
        self._all_here = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        self._num_waiting += 1
        all_here = self._all_here
        if self._num_waiting == self._num_requests:
            self._num_waiting, self._all_here = 0, asyncio.Event()
            asyncio.get_running_loop().call_later(self._delay_s, all_here.set)
        await all_here.wait()
        return web.Response(body=self._answer, content_type="application/json")

    async def serve(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the parent is gone


@asynccontextmanager
async def scripted_server(args: argparse.Namespace) -> AsyncIterator[str]:
    command = [sys.executable, __file__, "--serve", f"--requests={args.requests}", f"--tokens={args.tokens}", f"--delay={args.delay}"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def measure(args: argparse.Namespace) -> None:
    prompts = [np.arange(args.prompt_tokens, dtype=np.int32) % NUM_TOKEN_IDS + FIRST_TOKEN] * (args.requests // SAMPLES_PER_PROMPT)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    async with scripted_server(args) as url:
        engines = EngineGroup.connect([url], retries=0, timeout_s=TIMEOUT_S)
        runner = build_runner(engines, tokenizer, prompts, samples_per_prompt=SAMPLES_PER_PROMPT, num_tokens=args.tokens)
        gc.freeze()  # as a run does when its parts are made
        print(
            f"{args.requests:,} requests at once, {args.prompt_tokens} + {args.tokens} tokens; {resident_bytes() / 1e6:.0f} MB before",
            flush=True,
        )
        for step in range(args.rollouts):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            rollout = await runner.rollout(step)
            seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            check_complete(rollout, num_requests=args.requests, num_tokens=args.tokens)
            cost = f"{seconds:.1f} s, {cpu_s / args.requests * 1e3:.3f} CPU seconds a thousand requests"
            print(f"rollout {step}: {cost}, {resident_bytes() / 1e6:.0f} MB", flush=True)
            del rollout
        await engines.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="a multiple of 8")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file
    asyncio.run(ScriptedServer(args.tokens, args.requests, args.delay).serve() if args.serve else measure(args))


if __name__ == "__main__":
    main()
