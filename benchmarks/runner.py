"""CPU time and memory of the rollout runner: thousands of requests in flight against a scripted server.

    python benchmarks/runner.py [--requests 10000] [--prompt-tokens 512] [--tokens 256] [--rollouts 5]

A rollout has --requests samples, eight per prompt, all in flight at once, and goes through runner, sampler, HTTP client, checks,
detokenization and a reward that costs nothing. The server is a separate process, which answers each request after --delay seconds with the
same tokens and log-probabilities. The script prints, per rollout, CPU seconds of this process per thousand requests, its memory, and the
peak number of requests in the server. Growth from rollout to rollout would reveal a leak.
"""

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web
from scripted_server import serve, started
from synthetic_rollout import ASSETS, TIMEOUT_S, build_runner, check_complete
from transformers import AutoTokenizer

from fuligo.engines.group import EngineGroup
from fuligo.limits import freeze_garbage_collector

SAMPLES_PER_PROMPT = 8
FIRST_TOKEN, NUM_TOKEN_IDS = 10, 20


class ScriptedServer:
    """HTTP server that answers `/generate` with the same body after a fixed delay."""

    def __init__(self, num_tokens: int, delay_s: float) -> None:
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
        self._delay_s = delay_s
        self._num_running = 0
        self._most_running = 0

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        self._num_running += 1
        self._most_running = max(self._most_running, self._num_running)
        await asyncio.sleep(self._delay_s)
        self._num_running -= 1
        return web.Response(body=self._answer, content_type="application/json")

    async def loads(self, _: web.Request) -> web.Response:
        """Report the peak number of concurrent requests since the last call as running."""
        most, self._most_running = self._most_running, self._num_running
        return web.json_response({"loads": [{"num_running_reqs": most, "num_waiting_reqs": 0}]})

    async def abort(self, _: web.Request) -> web.Response:
        """Answer an abort, which is sent only if requests failed and others took their place."""
        return web.json_response({})

    async def serve(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_post("/abort_request", self.abort)
        await serve(app)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def measure(args: argparse.Namespace) -> None:
    prompts = [np.arange(args.prompt_tokens, dtype=np.int32) % NUM_TOKEN_IDS + FIRST_TOKEN] * (args.requests // SAMPLES_PER_PROMPT)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    async with started(sys.executable, __file__, "--serve", f"--tokens={args.tokens}", f"--delay={args.delay}") as url:
        engines = EngineGroup.connect([url], retries=0, timeout_s=TIMEOUT_S)
        runner = build_runner(engines, tokenizer, prompts, samples_per_prompt=SAMPLES_PER_PROMPT, num_tokens=args.tokens)
        freeze_garbage_collector()  # as a run does when its parts are made
        print(
            f"{args.requests:,} requests, {args.prompt_tokens} + {args.tokens} tokens; {resident_bytes() / 1e6:.0f} MB before",
            flush=True,
        )
        for step in range(args.rollouts):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            rollout = await runner.rollout(step)
            seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            check_complete(rollout, num_requests=args.requests, num_tokens=args.tokens)
            most = (await engines.load()).num_running
            cost = (
                f"{seconds:.1f} s, at most {most:,} requests at a time, {cpu_s / args.requests * 1e3:.3f} CPU seconds per thousand requests"
            )
            print(f"rollout {step}: {cost}, {resident_bytes() / 1e6:.0f} MB", flush=True)
            del rollout
        await engines.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="a multiple of 8")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--delay", type=float, default=5.0, help="seconds from a request to its answer")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file
    asyncio.run(ScriptedServer(args.tokens, args.delay).serve() if args.serve else measure(args))


if __name__ == "__main__":
    main()
