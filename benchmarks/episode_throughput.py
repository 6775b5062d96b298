r"""Tokens per second of episodes of several turns, compared with a bare client that sends the same requests.

    python benchmarks/episode_throughput.py --engine-python .venv-sglang/bin/python [--prompts 8 --samples 2 --turns 3 --tokens 32]
    python benchmarks/episode_throughput.py --engine-python python3 --device cuda --model models/smollm2 --prompts 64 --samples 8 \
        --tokens 512 --sglang '{"attention_backend": "triton", "sampling_backend": "pytorch", "dtype": "bfloat16"}'

With one or more engines behind one router, these two run `--repeats` times, in an order that alternates:

- fuligo: a rollout of the real runner. An environment answers each turn with the same message; the model's turns end at its end token or
  after `--tokens`. Parsing, rendering, records and rewards are those of a run.
- bare client: the requests of that rollout, sent to the same router with aiohttp and without fuligo's code. Turn k + 1 of an episode is
  sent when turn k is answered, and continues the client's own tokens with the same message. Every request has the rollout's sampling
  parameters, including the seed, and exactly as many new tokens.

The engines' cache is flushed before each; the first round is the warm-up. "reused" is the share of the tokens of previous turns (prompt and
answer without its last token, whose keys no engine has computed) that the engine read from its prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import aiohttp
import numpy as np
import orjson
from rollout_waves import add_fleet_flags, fleet, run_with_logs
from synthetic_rollout import TIMEOUT_S, build_runner
from talking_environment import made_environments
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fuligo.data.template import ChatTemplate
from fuligo.engines.generation import Generation, RequestOptions, SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.environments.load import EnvironmentFactory
from fuligo.environments.rendering import Renderer
from fuligo.limits import freeze_garbage_collector
from fuligo.models.directory import end_ids_of
from fuligo.rollout.episodes import Episodes, Limits
from fuligo.rollout.generate import SingleTurn
from fuligo.types import IntArray


@dataclass(slots=True)
class Request:
    """Request of one turn, and the engine's answer."""

    prompt_ids: IntArray
    output_ids: IntArray
    params: SamplingParams
    num_cached: int


@dataclass(slots=True)
class Measured:
    """Result of a rollout, by fuligo or by the bare client."""

    seconds: float
    cpu_s: float
    """CPU time of this process."""
    episodes: list[list[Request]]

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.output_ids) for turns in self.episodes for turn in turns)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def reused(self) -> float:
        """Share of the reusable prompt tokens that came from the cache."""
        cached = reusable = 0
        for turns in self.episodes:
            for before, after in itertools.pairwise(turns):
                known = np.concatenate([before.prompt_ids, before.output_ids])[:-1]
                same = known[: len(after.prompt_ids)] == after.prompt_ids[: len(known)]
                num_reusable = len(same) if same.all() else int(same.argmin())
                cached += min(after.num_cached, num_reusable)
                reusable += num_reusable
        return cached / max(1, reusable)


class Recorder:
    """Engine that limits each turn to `num_tokens`, lets the episode continue after them, and keeps the requests of every sample."""

    def __init__(self, engines: EngineGroup, num_tokens: int) -> None:
        self.engines = engines
        self.num_tokens = num_tokens
        self.requests: defaultdict[int, list[Request]] = defaultdict(list)

    async def generate(
        self, input_ids: Sequence[int] | IntArray, params: SamplingParams, *, rid: str, **options: Unpack[RequestOptions]
    ) -> Generation:
        limited = replace(params, max_new_tokens=self.num_tokens)
        generation = await self.engines.generate(input_ids, limited, rid=rid, **options)
        request = Request(np.asarray(input_ids, np.int32), generation.output_ids, limited, generation.cached_tokens)
        self.requests[int(rid.partition("-")[0])].append(request)
        return replace(generation, finish_reason="stop") if generation.finish_reason == "length" else generation


async def run_rollout(
    args: argparse.Namespace, engines: EngineGroup, tokenizer: PreTrainedTokenizerBase, environments: EnvironmentFactory
) -> Measured:
    """Run a rollout of the real runner."""
    recorder = Recorder(engines, args.tokens)
    episodes = Episodes(
        SingleTurn(recorder, tokenizer, timeout_s=TIMEOUT_S),
        environments,
        Renderer(tokenizer, ChatTemplate(tokenizer, {}), end_ids_of(args.model, tokenizer)),
        tokenizer,
        limits=Limits(max_turns=args.turns, turn_timeout_s=TIMEOUT_S, episode_timeout_s=TIMEOUT_S, max_context_len=None),
    )
    runner = build_runner(
        engines,
        tokenizer,
        [np.zeros(1, np.int32)] * args.prompts,  # the environment writes the prompts
        samples_per_prompt=args.samples,
        num_tokens=2**20,
        concurrency=args.concurrency,
        ignore_eos=False,
        generate=episodes,
    )
    gc.collect()
    freeze_garbage_collector()  # as a run does when its parts are made
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    rollout = await runner.rollout(0)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    if errors := [sample.error for group in rollout.groups for sample in group.samples if sample.error]:
        raise RuntimeError(f"{len(errors)} samples failed: {errors[0]}")
    return Measured(seconds, cpu_s, [recorder.requests[index] for index in sorted(recorder.requests)])


class BareClient:
    """Client that repeats the requests of a rollout without fuligo's code."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], concurrency: int) -> None:
        self.session = session
        self.url = f"{url}/generate"
        self.headers = headers | {"Content-Type": "application/json"}
        self.free = asyncio.Semaphore(concurrency)

    async def episode(self, turns: Sequence[Request]) -> list[Request]:
        """Send the requests of an episode, each of which continues the tokens that this client's earlier requests sampled."""
        sent: list[Request] = []
        async with self.free:
            for number, turn in enumerate(turns):
                ids = turn.prompt_ids
                if number:
                    before, last = turns[number - 1], sent[-1]
                    length = len(before.prompt_ids) + len(before.output_ids)
                    if np.array_equal(ids[:length], np.concatenate([before.prompt_ids, before.output_ids])):
                        ids = np.concatenate([last.prompt_ids, last.output_ids, ids[length:]])
                sent.append(await self.send(ids, turn))
        return sent

    async def send(self, ids: IntArray, turn: Request) -> Request:
        params = replace(turn.params, max_new_tokens=len(turn.output_ids), ignore_eos=True).to_json()
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": -1}
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self.session.post(self.url, data=data, headers=self.headers) as response:
            answer: Any = orjson.loads(await response.read())
            if response.status != 200 or len(answer["output_ids"]) != len(turn.output_ids):
                raise RuntimeError(f"status {response.status}: {answer!r:.500}")
        return Request(ids, np.asarray(answer["output_ids"], np.int32), turn.params, answer["meta_info"]["cached_tokens"])


async def run_client(args: argparse.Namespace, engines: EngineGroup, recorded: Measured) -> Measured:
    """Send the requests of a rollout again."""
    router = engines.router
    assert router is not None
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        client = BareClient(session, router.url, router.keys.headers("POST", "/generate"), args.concurrency)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        episodes = await asyncio.gather(*(client.episode(turns) for turns in recorded.episodes))
        return Measured(time.perf_counter() - start_s, time.process_time() - start_cpu_s, list(episodes))


async def measure(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    start_s = time.perf_counter()
    async with fleet(args) as running:
        print(f"engines ready after {time.perf_counter() - start_s:.0f} s", flush=True)
        environments = made_environments("Story", {"samples_per_prompt": args.samples}, args.isolation)
        results: dict[str, list[Measured]] = {"fuligo": [], "bare client": []}
        recorded: Measured | None = None
        for number in range(args.repeats + 1):
            order = ("bare client", "fuligo") if number % 2 == 0 and number else ("fuligo", "bare client")
            for name in order:
                await asyncio.gather(*(client.flush_cache() for client in running.group.clients))
                if name == "fuligo":
                    result = recorded = await run_rollout(args, running.group, tokenizer, environments)
                else:
                    assert recorded is not None
                    result = await run_client(args, running.group, recorded)
                report(f"{number or 'warm-up'}: {name}", result)
                if number:
                    results[name].append(result)
        await environments.close()
        summarize(args, results["fuligo"], results["bare client"])


def report(name: str, result: Measured) -> None:
    num_turns = sum(map(len, result.episodes))
    print(
        f"{name}: {num_turns} requests, {result.num_tokens} tokens in {result.seconds:.2f} s, {result.rate:,.0f} tok/s, "
        f"{1000 * result.cpu_s / num_turns:.2f} CPU ms per turn, reused {result.reused:.3f}",
        flush=True,
    )


def summarize(args: argparse.Namespace, ours: list[Measured], bare: list[Measured]) -> None:
    ratios = [one.rate / other.rate for one, other in zip(ours, bare, strict=True)]
    rates = [statistics.median(each.rate for each in results) for results in (ours, bare)]
    print(f"{args.prompts} x {args.samples} episodes of {args.turns} turns, at most {args.concurrency} at a time")
    print(f"median: fuligo {rates[0]:,.0f} tok/s, bare client {rates[1]:,.0f} tok/s")
    print(f"fuligo / bare client = {rates[0] / rates[1]:.3f} (by round: {', '.join(f'{ratio:.3f}' for ratio in ratios)})")
    print(f"prefix reuse across turns: fuligo {min(each.reused for each in ours):.3f}, bare client {min(each.reused for each in bare):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_fleet_flags(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="episodes of a prompt")
    parser.add_argument("--concurrency", type=int, help="episodes at a time (default: all)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="maximum number of tokens of a turn")
    parser.add_argument("--isolation", choices=("process", "none"), default="process", help="--environment-isolation")
    parser.add_argument("--repeats", type=int, default=4, help="rounds; an even number balances the orders")
    args = parser.parse_args()
    args.concurrency = args.concurrency or args.prompts * args.samples
    run_with_logs(measure, args)


if __name__ == "__main__":
    main()
