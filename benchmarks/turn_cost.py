"""CPU time of a turn of an episode over HTTP, compared with a bare client that sends the same requests.

    python benchmarks/turn_cost.py [--model models/smollm2] [--episodes 512] [--turns 3] [--tokens 456] [--repeats 4]

Runs the rollout and the bare client of `episode_throughput.py` with a scripted server in another process in place of the engine. The server
waits until every episode has sent its request, then answers all of them, in SGLang's format, with English text of `--tokens` tokens and
log-probabilities. All episodes therefore advance together, which is the worst case. Prints, for the two alternately, `--repeats` times
after a warm-up: CPU time of this process per turn, and the time from the first answer of a turn to the first and to the last request of the
next one, in which a real engine would partly idle. `--profile` writes the profile of one more rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import statistics
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import orjson
from aiohttp import web
from episode_throughput import Measured, run_client, run_rollout
from scripted_server import serve, started
from synthetic_rollout import ASSETS, TIMEOUT_S
from talking_environment import made_environments
from transformers import AutoTokenizer

from fuligo.engines.group import EngineGroup

WORDS = (
    "the village by a river has mill school and market on days farmers of many valleys bring grain honey cloth rainy morning people there "
    "say to each other about place more exactly who arrives old woman sells bread children run between wooden stalls rain falls softly"
)
NUM_ANSWERS = 64


def english(seed: int, num_words: int) -> str:
    """Return a text of random English words in sentences."""
    words = np.random.default_rng(seed).choice(WORDS.split(), num_words)
    ends = [". " if number % 11 == 10 else ", " if number % 7 == 6 else " " for number in range(num_words)]
    return "".join(word + end for word, end in zip(words.tolist(), ends))


class ScriptedServer:
    """HTTP server that answers `/generate` when `wave` requests have arrived."""

    def __init__(self, model: str, num_tokens: int, wave: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [english(seed, 4 * num_tokens) for seed in range(NUM_ANSWERS)]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"][: num_tokens - 1] for text in texts]
        self._answers = [self._answer([*each, tokenizer.eos_token_id], tokenizer.decode(each), seed) for seed, each in enumerate(ids)]
        self._num_requests = 0
        self._wave = wave
        self._waiting: list[asyncio.Future[None]] = []
        self._answered_s: float | None = None
        self._first_s = 0.0
        self._gaps: list[tuple[float, float]] = []
        """Seconds from the answers of a turn to the first and to the last request of the next one."""

    @staticmethod
    def _answer(ids: list[int], text: str, seed: int) -> bytes:
        logprobs = -np.random.default_rng(seed).exponential(0.5, len(ids)).astype(np.float32)
        meta = {
            "id": "scripted",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": 1,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "0",
            "input_token_logprobs": [],
            "output_token_logprobs": [[float(logprob), token, None] for logprob, token in zip(logprobs, ids)],
        }
        return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        now_s = time.perf_counter()
        if not self._waiting:
            self._first_s = now_s
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        if len(self._waiting) == self._wave:
            if self._answered_s is not None:
                self._gaps.append((self._first_s - self._answered_s, now_s - self._answered_s))
            waiting, self._waiting, self._answered_s = self._waiting, [], now_s
            for other in waiting:
                other.set_result(None)
        await answered
        self._num_requests += 1
        return web.Response(body=self._answers[self._num_requests % NUM_ANSWERS], content_type="application/json")

    async def gaps(self, _: web.Request) -> web.Response:
        """Return the gaps since the last call."""
        gaps, self._gaps, self._answered_s = self._gaps, [], None
        return web.json_response(gaps)

    async def serve(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/gaps", self.gaps)
        await serve(app)


async def measure(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    results: dict[str, list[tuple[float, float, float]]] = {"fuligo": [], "bare client": []}
    sizes = (f"--model={args.model}", f"--tokens={args.tokens}", f"--episodes={args.episodes}")
    async with (
        started(sys.executable, __file__, "--serve", *sizes) as url,
        aiohttp.ClientSession() as session,
    ):
        engines = EngineGroup.connect([url], router_url=url, retries=0, timeout_s=TIMEOUT_S)
        environments = made_environments("Story", {"samples_per_prompt": args.samples}, args.isolation)
        recorded: Measured | None = None
        for number in range(args.repeats + 1):
            for name in ("fuligo", "bare client"):
                if name == "fuligo":
                    result = recorded = await run_rollout(args, engines, tokenizer, environments)
                else:
                    assert recorded is not None
                    result = await run_client(args, engines, recorded)
                async with session.get(f"{url}/gaps") as response:
                    gaps = np.array(await response.json())
                first_s, last_s = gaps.mean(axis=0) if len(gaps) else (0.0, 0.0)
                cpu_ms = 1000 * result.cpu_s / sum(map(len, result.episodes))
                print(
                    f"{number or 'warm-up'}: {name}, {cpu_ms:.2f} CPU ms per turn; from the answers to the first request {first_s:.2f} s, "
                    f"to the last {last_s:.2f} s",
                    flush=True,
                )
                if number:
                    results[name].append((cpu_ms, first_s, last_s))
        if args.profile:
            profile = cProfile.Profile()
            profile.enable()
            await run_rollout(args, engines, tokenizer, environments)
            profile.disable()
            profile.dump_stats(args.profile)
        await environments.close()
        await engines.close()
    ours, bare = ([statistics.median(column) for column in zip(*rows)] for rows in results.values())
    print(f"{args.episodes} episodes of {args.turns} turns of {args.tokens} tokens; medians of {args.repeats} rounds")
    print(f"CPU ms per turn: fuligo {ours[0]:.2f}, bare client {bare[0]:.2f}, ratio {ours[0] / bare[0]:.2f}")
    print(f"seconds to the first request: fuligo {ours[1]:.2f}, bare client {bare[1]:.2f}; to the last: {ours[2]:.2f}, {bare[2]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ASSETS / "model"))
    parser.add_argument("--episodes", type=int, default=512, help="a multiple of 8")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=456, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--isolation", choices=("process", "none"), default="process", help="--environment-isolation")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.samples, args.concurrency = 8, args.episodes
    args.prompts = args.episodes // args.samples
    if args.serve:
        asyncio.run(ScriptedServer(args.model, args.tokens, args.episodes).serve())
    else:
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
