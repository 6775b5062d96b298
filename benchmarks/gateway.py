"""CPU time of the gateway per turn, compared with a bare HTTP server that gets the same requests.

    python benchmarks/gateway.py [--episodes 1000] [--turns 8] [--concurrency 64] [--tokens 64]

The engine answers at once. Each episode is a session of `--turns` HTTP requests whose conversation grows by one answer of `--tokens` tokens
and one question per turn. CPU time is that of a child process that only serves; the clients are in the parent. Two servers are measured:

- gateway: chat completions of sessions;
- bare: the same HTTP server that reads the same bodies and returns a fixed answer, which is what any server costs.

The difference is what the gateway adds to a turn: matching the conversation, rendering, tokenizing, parsing. Memory is the growth of the
child from one third of the episodes to the end.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import numpy as np
import orjson
from starlette.requests import Request as HttpRequest
from transformers import AutoTokenizer

from fuligo.cli.quickstart import ASSETS
from fuligo.data.template import ChatTemplate
from fuligo.engines.generation import Generation, SamplingParams
from fuligo.engines.openai_format import json_response
from fuligo.environments.rendering import Renderer
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Policy, Session

QUESTION = "What is 695 + 830? Think step by step and box the answer."


class Instant:
    """Engine that answers at once with the same tokens."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.logprobs = np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)

    async def generate(self, input_ids, params, **_: object) -> Generation:
        return Generation(self.ids, self.logprobs, "stop", 0, len(input_ids), 0, "", engine=0)


class Bare(Gateway):
    """Gateway that reads a request and returns a fixed answer."""

    async def _chat(self, session: Session, http: HttpRequest, raw: bytes):
        orjson.loads(raw)
        return json_response(ANSWER)


ANSWER = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "695 + 830 " * 6}, "finish_reason": "stop"}]}


def rss_mib() -> float:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def serve(kind: str, pipe: Connection, num_tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer("695 + 830 = 1525. " * num_tokens, add_special_tokens=False)["input_ids"][: num_tokens - 1]
    renderer = Renderer(tokenizer, ChatTemplate(tokenizer, {}), frozenset([end]))
    policy = Policy(Instant([*text, end]), renderer, tokenizer, name="policy", timeout_s=60.0)
    gateway = (Bare if kind == "bare" else Gateway)(policy)
    sessions: dict[str, Session] = {}
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    async def command(what: str, name: str) -> None:
        if what == "open":
            session = await gateway.open(SamplingParams(max_new_tokens=2 * num_tokens), label="0")
            sessions[session.base_url] = session
            pipe.send((session.base_url, session.api_key))
        elif what == "end":
            gateway.end(sessions.pop(name))
        elif what == "cpu":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((usage.ru_utime + usage.ru_stime, rss_mib()))
        else:
            stopped.set()

    loop.add_reader(pipe.fileno(), lambda: loop.create_task(command(*pipe.recv())))
    await stopped.wait()
    loop.remove_reader(pipe.fileno())
    await gateway.close()


def child(kind: str, pipe: Connection, num_tokens: int) -> None:
    asyncio.run(serve(kind, pipe, num_tokens))


async def measure(kind: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the server's CPU milliseconds per turn, and the growth of its memory in MiB."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=child, args=(kind, theirs, args.tokens))
    process.start()
    asked = asyncio.Lock()
    free = asyncio.Semaphore(args.concurrency)

    async def call(what: str, name: str = "") -> tuple:
        async with asked:
            pipe.send((what, name))
            return await asyncio.to_thread(pipe.recv) if what in ("open", "cpu") else ()

    async def episode(http: aiohttp.ClientSession) -> None:
        async with free:
            url, key = await call("open")
            messages = [{"role": "user", "content": QUESTION}]
            for _ in range(args.turns):
                body = json.dumps({"model": "policy", "messages": messages}).encode()
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                async with http.post(f"{url}/chat/completions", data=body, headers=headers) as answer:
                    answer.raise_for_status()
                    message = orjson.loads(await answer.read())["choices"][0]["message"]
                messages += [message, {"role": "user", "content": QUESTION}]
            await call("end", url)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(episode(http) for _ in range(args.concurrency)))
        first = args.episodes // 3
        before_s, _ = await call("cpu")
        await asyncio.gather(*(episode(http) for _ in range(first)))
        _, before_mib = await call("cpu")
        await asyncio.gather(*(episode(http) for _ in range(args.episodes - first)))
        after_s, after_mib = await call("cpu")
    await call("stop")
    process.join()
    return 1000 * (after_s - before_s) / (args.episodes * args.turns), after_mib - before_mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    args = parser.parse_args()
    costs = {}
    for kind in ("bare", "gateway"):
        start_s = time.perf_counter()
        costs[kind], growth = asyncio.run(measure(kind, args))
        print(f"{kind}: {costs[kind]:.3f} CPU ms per turn, memory {growth:+.1f} MiB, {time.perf_counter() - start_s:.0f} s", flush=True)
    print(f"the gateway adds {costs['gateway'] - costs['bare']:.3f} CPU ms to a turn of {args.tokens} tokens")


if __name__ == "__main__":
    main()
